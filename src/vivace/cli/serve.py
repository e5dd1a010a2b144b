"""``vivace serve``: serve a model over OpenAI's HTTP interface, with a page for trying it out."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vivace
from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.errors import ConfigError, DependencyError, UnsupportedError

if TYPE_CHECKING:
    from vivace.serve.app import Server
    from vivace.serve.config import ServeConfig

_SERVER = "Server"
_LIMITS = "Limits"


@options.grouped
def serve(
    *,
    model: options.Model = None,
    load: options.LoadFlags,
    store: options.StoreFlags,
    cache: options.PromptCacheFlags,
    ranks: options.ParallelFlags,
    reading: options.PrefillFlags,
    guard: options.GuardFiles = None,
    method: Annotated[str, typer.Option(help="How requests are decoded that do not say.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535, rich_help_panel=_SERVER)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that callers must send, repeatable. Other users of this machine see it in the process list; "
            "--api-key-file hides it.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="File of keys, one a line; - reads standard input.", rich_help_panel=_SERVER)
    ] = None,
    allow_no_key: Annotated[
        bool,
        typer.Option("--allow-no-key", help="Be reached from other machines without a key.", rich_help_panel=_SERVER),
    ] = False,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Names the server is asked under, as behind a reverse proxy, separated by commas; *.NAME is all "
            "below it, * any.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            help="Sites whose pages may ask the server, such as https://app.example.com, separated by commas; * all.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the base model; left out: its folder's.", rich_help_panel=_SERVER)
    ] = None,
    adapter_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of LoRAs that callers may load and unload by name; needs a key.",
            metavar="DIR",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    metrics_compat: Annotated[
        str | None, typer.Option(help="vllm: metrics also under vLLM's names.", rich_help_panel=_SERVER)
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that answers may still run after a stop.", min=0, rich_help_panel=_SERVER)
    ] = 10.0,
    stall_timeout: Annotated[
        float,
        typer.Option(help="Seconds in one step after which the server calls itself hung.", rich_help_panel=_SERVER),
    ] = 120.0,
    max_num_seqs: Annotated[int, typer.Option(help="Answers written at once.", min=1, rich_help_panel=_LIMITS)] = 16,
    max_queue: Annotated[int, typer.Option(help="Answers that may wait.", min=0, rich_help_panel=_LIMITS)] = 64,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Prompt and answer, in tokens; left out: the model's context, at most 8192.",
            min=2,
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    default_max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer of requests that do not say.", min=1, rich_help_panel=_LIMITS),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Bytes of the body of a request.", min=1, rich_help_panel=_LIMITS)
    ] = 1 << 20,
    max_connections: Annotated[
        int, typer.Option(help="Connections open at once.", min=1, rich_help_panel=_LIMITS)
    ] = 512,
    head_timeout: Annotated[float, typer.Option(help="Seconds for a request's head.", rich_help_panel=_LIMITS)] = 10.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds for its body.", rich_help_panel=_LIMITS)] = 30.0,
    idle_timeout: Annotated[
        float, typer.Option(help="Seconds a connection may stay open between requests.", rich_help_panel=_LIMITS)
    ] = 60.0,
    read_timeout: Annotated[
        float, typer.Option(help="Seconds a client may leave a ready answer unread.", rich_help_panel=_LIMITS)
    ] = 60.0,
    adapter_memory: Annotated[
        str | None,
        typer.Option(
            help="Most memory for LoRAs, such as 64MiB; those that no request runs leave when others are asked for.",
            metavar="SIZE",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    prefill_budget: Annotated[
        int, typer.Option(help="Prompt tokens read between two steps.", min=1, rich_help_panel=_LIMITS)
    ] = 256,
    prefix_cache: Annotated[
        str,
        typer.Option(
            help="Most memory for prompts and answers seen before, given back when texts need it; 0 keeps none.",
            rich_help_panel=_LIMITS,
        ),
    ] = "256MiB",
) -> None:
    """Answer HTTP requests in OpenAI's format, many at a time; a page for trying it out is at /."""
    config_of = _settings()
    if metrics_compat not in (None, "vllm"):
        raise ConfigError(f"--metrics-compat must be vllm, found {metrics_compat!r}")
    from vivace.serve.keys import read_keys
    from vivace.units import parse_bytes

    config = config_of(
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *(() if api_key_file is None else read_keys(api_key_file))),
        allow_no_key=allow_no_key,
        allowed_hosts=_listed(allowed_hosts),
        cors=_listed(cors),
        served_model_name=served_model_name or _name(model),
        method=method,
        **options.given(**vars(reading)),
        num_slots=max_num_seqs,
        max_queue=max_queue,
        max_model_len=max_model_len,
        default_max_tokens=default_max_tokens,
        adapter_bytes=None if adapter_memory is None else parse_bytes(adapter_memory),
        adapter_folder=adapter_folder,
        max_body_bytes=max_body_bytes,
        max_connections=max_connections,
        head_timeout_s=head_timeout,
        body_timeout_s=body_timeout,
        idle_timeout_s=idle_timeout,
        read_timeout_s=read_timeout,
        prefill_budget=prefill_budget,
        prefix_cache_bytes=parse_bytes(prefix_cache),
        grace_s=grace,
        stall_timeout_s=stall_timeout,
        metrics_compat=metrics_compat is not None,
    )
    if adapter_memory is not None and not load.adapter and adapter_folder is None:
        raise ConfigError("--adapter-memory has no effect without --adapter or --adapter-folder; leave it out")
    found = options.parse_adapters(load.adapter)
    adapters = {found.rstrip("/").rpartition("/")[2]: found} if isinstance(found, str) else found
    engine = open_engine(model, (), replace(load, adapter=None), store, cache, ranks, guard=guard, reads_sources=True)
    if engine.model.encoder is not None and (adapters or adapter_folder):
        raise UnsupportedError("adapters are for decoders without an encoder; leave out --adapter and --adapter-folder")
    from vivace.serve.app import Server

    server = Server(engine, config, adapters, vivace.__version__)
    at_once = f"{server.worker.num_slots} answers at once"
    if engine.world is not None:
        console.note("prompts are not kept in memory: on several ranks --prefix-cache has no effect")
    console.note(f"serving {', '.join(server.catalog.names())}; {server.max_model_len} tokens a sequence, {at_once}")
    run(server)


def _settings() -> type[ServeConfig]:
    """Return the class of the server's settings.

    Raises:
        DependencyError: a package that the server needs is missing.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as exc:
        raise DependencyError(f"vivace serve needs {exc.name}; install vivace[serve]") from exc
    from vivace.serve.config import ServeConfig

    return ServeConfig


def _listed(words: list[str] | None) -> tuple[str, ...]:
    """Split the values of a flag that may be repeated at their commas."""
    return tuple(part.strip() for word in words or () for part in word.split(","))


def _name(model: str | None) -> str:
    """Return the name of a model's folder."""
    from vivace.engine import SHIPPED

    return SHIPPED.name if model is None else model.rstrip("/").rpartition("/")[2]


def run(server: Server) -> None:
    """Serve until a signal stops it; answers in progress may then finish within the grace time.

    Raises:
        WorldError: another rank of the model has ended, and with it this server.
    """
    import uvicorn

    from vivace.serve.app import build

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("vivace.serve").setLevel(logging.WARNING if console.is_quiet else logging.INFO)

    world = server.engine.world

    class Announced(uvicorn.Server):
        """A server that prints its addresses once it listens, and stops when a rank of its model has ended."""

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or (world is not None and not world.is_whole())

        async def shutdown(self, sockets: object = None) -> None:
            await super().shutdown(sockets)  # type: ignore[arg-type]
            if world is not None:
                world.close()  # now, since the signal that stops a server ends its process behind this line

        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets)  # type: ignore[arg-type]
            for listening in getattr(self, "servers", []):
                for socket in listening.sockets:
                    name, number = socket.getsockname()[:2]
                    console.note(f"listening on http://{f'[{name}]' if ':' in name else name}:{number}")

    Announced(server.connections.settings(build(server))).run()
    if world is not None and world.links.has_failed:
        assert world.links.failure is not None
        raise world.links.failure
