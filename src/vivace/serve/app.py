"""The routes of the server."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from vivace.decode.memory import text_bytes
from vivace.decode.request import Emitted
from vivace.engine import Engine, Options
from vivace.errors import VivaceError
from vivace.serve.answering import Echo, EventStream, Reply, cancel_on_disconnect, head
from vivace.serve.api_error import APIError, api_error_of, error_body
from vivace.serve.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    LoadLoraBody,
    ModerationBody,
    TokenizeBody,
    UnloadLoraBody,
)
from vivace.serve.call import Call, Calls
from vivace.serve.catalog import Catalog
from vivace.serve.config import LONGEST_DEFAULT, ServeConfig
from vivace.serve.connections import Connections
from vivace.serve.document import describe, takes
from vivace.serve.encoding import encoded
from vivace.serve.health import check_live, check_ready
from vivace.serve.lanes import Lane
from vivace.serve.long_text import LONG
from vivace.serve.loras import LoraRoutes
from vivace.serve.metrics import Metrics
from vivace.serve.middleware import Middleware
from vivace.serve.moderation import Moderation
from vivace.serve.parsing import ParsedRequest, RequestParser
from vivace.serve.prompts import Prompts
from vivace.serve.replies import ChatShape, Extras, ResponseShape, TextShape
from vivace.serve.scoring import Scored, spelt
from vivace.serve.server_metrics import ServerFigures
from vivace.serve.trimming import trim
from vivace.serve.worker import Worker

B = TypeVar("B", bound=GenerationBody)
log = logging.getLogger(__name__)
SWITCH_S = 0.0005
"""Seconds for which a thread computes in Python before another has its turn. Whenever the event loop has read from a
socket or written to one, it waits that long for each computing thread (the convoy effect, D. Beazley, *Understanding
the Python GIL*, 2010). With Python's own 5 ms it was .2 s late beside five of them."""
CYCLES_AFTER = 50_000
"""Number of new objects after which Python searches for cycles among them. A body of a megabyte can be a third of a
million lists; searching after every 700, the default, would examine all of them again and again and stop every thread.
"""
LARGE = 1 << 16
"""Bytes above which a body is parsed in a thread: parsing it keeps Python's lock for some tens of milliseconds."""
PLAYGROUND = Path(__file__).parent / "playground.html"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in (
        (400, "A field is unknown, out of range or cannot be followed."),
        (401, "The API key is missing or wrong."),
        (403, "This server does not do that."),
        (404, "No such model."),
        (409, "The adapter is there already, or in use."),
        (413, "The body is too large."),
        (429, "The queue is full, or memory is."),
        (503, "The server is stopping."),
    )
}
_UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"description": "The worker has ended or hangs, or is stopping."}}


class Server:
    """An engine, its worker, and the routes."""

    def __init__(
        self, engine: Engine, config: ServeConfig, adapters: Mapping[str, str | Path] | None = None, version: str = "0"
    ) -> None:
        """Load adapters and allocate the cache; the worker starts with the application.

        Args:
            engine: the base model.
            config: settings.
            adapters: folders by the name they are served under.
            version: of the package.

        Raises:
            VivaceError: an adapter or the cache cannot be had.
        """
        self.engine = engine
        self.config = config
        self.version = version
        if config.adapter_bytes is not None:
            engine.adapters.limit(config.adapter_bytes)
        self.catalog = Catalog(engine, config.served_model_name, config.method, adapters or {})
        self.loras = LoraRoutes(self.catalog, config.adapter_folder)
        context = engine.model.config.max_positions
        asked = min(context, LONGEST_DEFAULT) if config.max_model_len is None else config.max_model_len
        if asked > context:
            raise APIError(400, f"max_model_len is {asked}; the context of this model holds {context}")
        prefix = engine.prefix_cache
        if prefix is None and config.prefix_cache_bytes and not engine.model.stateful and engine.world is None:
            prefix = engine.new_prefix_cache(config.prefix_cache_bytes)
        drafter = self.catalog.drafter(config.served_model_name, config.method, None)
        if config.max_model_len is None:
            asked = max(2, engine.memory.longest_text(engine.model, drafter, asked))
        needed = text_bytes(engine.model, drafter, asked)
        engine.memory.check_text(needed, asked)
        engine.memory.least_room_bytes = needed  # no method that a request asks for keeps others from being answered
        self.max_model_len = asked
        self.calls = Calls()
        self.connections = Connections(config)
        self.worker = Worker(
            engine.model,
            self.calls.dispatch,
            num_slots=config.num_slots,
            capacity=asked,
            max_queue=config.max_queue,
            prefill_budget=config.prefill_budget,
            memory=engine.memory,
            num_beams=engine.num_beams,
        )
        self.worker.prefix = prefix
        self.worker.on_disk = engine.prompt_cache
        num_open = self.worker.num_slots + self.worker.max_queue
        self.texts = Lane("texts", num_threads=2, max_open=num_open)
        self.large = Lane("large", num_threads=1, max_open=num_open)
        self.heavy = Lane("heavy", num_threads=2, max_open=num_open)
        prompts = Prompts(engine, asked, num_open)
        names = ("prefill", "keep", "min_prompt", "decode_keep")
        reading = Options.of({name: getattr(config, name) for name in names})
        engine.prefills.of(reading.reading, asked)
        self.moderation = Moderation(engine, self.catalog, asked)
        self.asking = RequestParser(engine, self.catalog, prompts, prefix, asked, config.default_max_tokens, reading)
        self.figures = ServerFigures(config.served_model_name, self.calls, self.connections, self.worker)
        self.metrics = Metrics(config.served_model_name, self.worker, self.figures, compat=config.metrics_compat)

    @property
    def fingerprint(self) -> str:
        """Return a short hash of everything besides the request that an answer depends on."""
        return f"vivace-{self.version}-{str(self.engine.model.dtype).removeprefix('torch.')}-{self.engine.kernels.name}"

    async def chat(self, request: Request) -> Response:
        """Answer a request to ``/v1/chat/completions``."""
        body, parsed = await self._asked(ChatBody, request)
        extras = Extras(body.logprobs, body.return_token_ids, body.return_trace)
        return await self._answer(parsed, body, ChatShape(), extras, request)

    async def complete(self, request: Request) -> Response:
        """Answer a request to ``/v1/completions``, echoed prompts included."""
        body, parsed = await self._asked(CompletionBody, request)
        echoes = await cancel_on_disconnect(request, self._echoes(body, parsed)) if body.echo else []
        extras = Extras(body.logprobs is not None, body.return_token_ids, body.return_trace)
        return await self._answer(parsed, body, TextShape(), extras, request, echoes, num_new=body.max_tokens)

    async def _asked(self, kind: type[B], request: Request) -> tuple[B, ParsedRequest]:
        """Parse the body of a request beside the event loop."""
        raw, owner = await request.body(), request.state.owner
        return await cancel_on_disconnect(request, self._read(kind, raw, owner, request))

    async def _read(self, kind: type[B], raw: bytes, owner: bytes, request: Request) -> tuple[B, ParsedRequest]:
        lane = self.large if len(raw) > LARGE else self.texts
        begun = await lane.run(self.asking.begin, kind, raw)
        body = begun.body
        assert isinstance(body, kind)
        self._note(body, request)
        if begun.takes_long:
            begun = await self.heavy.run(self.asking.go_on, begun, owner)
        return body, await self.texts.run(self.asking.finish, begun, owner)

    async def _answer(
        self,
        parsed: ParsedRequest,
        body: GenerationBody,
        shape: ResponseShape,
        extras: Extras,
        request: Request,
        echoes: list[Echo] | None = None,
        *,
        num_new: int | None = None,
    ) -> Response:
        reply = Reply(parsed, body, shape, head(parsed, shape, self.fingerprint), extras, echoes or [], num_new=num_new)
        call = reply.call(self.worker, self.calls)
        call.start()
        if body.stream:
            return EventStream(reply, call, self.metrics)
        try:
            await cancel_on_disconnect(request, reply.gather(call, self.metrics))
            return _json(await self.texts.finish(lambda: encoded(reply.whole())))
        finally:
            call.close()

    async def _echoes(self, body: CompletionBody, parsed: ParsedRequest) -> list[Echo]:
        """Return the prompts as the beginnings of their answers, scored where log-probabilities are wanted."""
        decode = self.engine.tokenizer.decode
        texts = await self.texts.run(lambda: [decode(tokens) for tokens in parsed.prompts])
        if body.logprobs is None:
            return [Echo(text) for text in texts]
        scored: list[Scored | None] = [None] * len(texts)
        firsts = parsed.requests[:: body.n]
        call = Call(self.worker, self.calls, firsts, priority=body.priority, scores=body.logprobs)
        call.start()
        try:
            async for found in call.events():
                if found is not None and isinstance(found[1], Scored):
                    scored[found[0]] = found[1]
        finally:
            call.close()
        triples = list(zip(texts, parsed.prompts, scored, strict=True))
        return await self.texts.finish(lambda: [self._echo(*triple) for triple in triples])

    def _echo(self, text: str, tokens: tuple[int, ...], scored: Scored | None) -> Echo:
        assert scored is not None, "every prompt was scored, or the call raised"
        return Echo(text, spelt(self.engine.tokenizer, tokens, scored))

    async def tokenize(self, request: Request) -> Response:
        """Answer a request to ``/tokenize``."""
        prompts, raw = self.asking.prompts, await request.body()
        text, special = await self.texts.run(self.asking.to_tokenize, raw)

        def found() -> bytes:
            tokens = prompts.tokens(text, special=special)
            return encoded({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

        return _json(await cancel_on_disconnect(request, self._lane(text).run(found)))

    async def detokenize(self, request: Request) -> Response:
        """Answer a request to ``/detokenize``."""
        prompts, raw = self.asking.prompts, await request.body()
        tokens = await self.texts.run(self.asking.to_detokenize, raw)
        return _json(
            await cancel_on_disconnect(
                request, self._lane(tokens).run(lambda: encoded({"prompt": prompts.text(tokens)}))
            )
        )

    async def moderate(self, request: Request) -> Response:
        """Answer a request to ``/v1/moderations``."""
        raw = await request.body()
        texts, requests = await cancel_on_disconnect(request, self.heavy.run(self.moderation.asked, raw))
        call = Call(self.worker, self.calls, requests)
        call.start()
        measured: list[dict[str, float]] = [{} for _ in requests]
        try:
            async for found in call.events():
                if found is not None and isinstance(found[1], Emitted):
                    measured[found[0]] = found[1].stats.guard
        finally:
            call.close()
        return _json(await self.heavy.finish(lambda: encoded(self.moderation.reply(texts, measured))))

    async def load_lora(self, request: Request) -> Response:
        """Answer a request to ``/v1/load_lora_adapter``."""
        return Response(await self.texts.run(self.loras.load, await request.body()), media_type="text/plain")

    async def unload_lora(self, request: Request) -> Response:
        """Answer a request to ``/v1/unload_lora_adapter``."""
        return Response(await self.texts.run(self.loras.unload, await request.body()), media_type="text/plain")

    def _lane(self, text: str | list[int]) -> Lane:
        """Return the threads that turn this text into tokens, or these tokens into a text."""
        return self.heavy if len(text) > LONG else self.texts

    @staticmethod
    def _note(body: GenerationBody, request: Request) -> None:
        user = body.safety_identifier if body.user is None else body.user
        note = "" if user is None else f" user={user[:100]!r}"
        log.info("%s %s%s", request.state.request_id, request.url.path, note)


def build(server: Server) -> FastAPI:
    """Return the ASGI application of a server: its routes, middleware and lifespan."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        server.calls.loop = asyncio.get_running_loop()
        server.worker.start()
        # Python's search for cycles stops every thread while it looks at all objects: 0.3 s for those of the libraries.
        # These are there to stay, and frozen they are left out.
        gc.collect()
        gc.freeze()
        thresholds = gc.get_threshold()
        gc.set_threshold(CYCLES_AFTER, *thresholds[1:])
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        tasks = [asyncio.create_task(task) for task in (server.figures.lag.run(), trim())]
        yield
        for task in tasks:
            task.cancel()
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        server.worker.close()
        server.texts.close()
        server.large.close()
        server.heavy.close()
        server.asking.grammars.close()

    app = FastAPI(title="vivace", version=server.version, lifespan=life, docs_url=None, redoc_url=None)
    app.add_middleware(Middleware, config=server.config, responded=server.connections.responded)
    if server.config.cors:  # outermost: browsers ask beforehand without a key, and must be able to read refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.config.cors,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    _answer_errors(app)
    _generation_routes(app, server)
    _other_routes(app, server)
    _adapter_routes(app, server)
    describe(
        app, (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, ModerationBody, LoadLoraBody, UnloadLoraBody)
    )
    return app


def _json(content: bytes) -> Response:
    """A response whose JSON was written beside the event loop."""
    return Response(content, media_type="application/json")


def _generation_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS, openapi_extra=takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation (OpenAI's chat completions)."""
        return await server.chat(request)

    @app.post("/v1/completions", responses=_ERRORS, openapi_extra=takes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one or several texts (OpenAI's completions)."""
        return await server.complete(request)

    @app.post("/v1/moderations", responses=_ERRORS, openapi_extra=takes(ModerationBody))
    async def moderations(request: Request) -> Response:
        """Say what the server's guard finds in texts (OpenAI's moderations)."""
        return await server.moderate(request)

    @app.post("/tokenize", responses=_ERRORS, openapi_extra=takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or of messages."""
        return await server.tokenize(request)

    @app.post("/detokenize", responses=_ERRORS, openapi_extra=takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        return await server.detokenize(request)


def _adapter_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/load_lora_adapter", responses=_ERRORS, openapi_extra=takes(LoadLoraBody))
    async def load_lora_adapter(request: Request) -> Response:
        """Serve a LoRA of the server's folder from now on (vLLM's route)."""
        return await server.load_lora(request)

    @app.post("/v1/unload_lora_adapter", responses=_ERRORS, openapi_extra=takes(UnloadLoraBody))
    async def unload_lora_adapter(request: Request) -> Response:
        """Serve a LoRA no more; one that a request runs or waits with stays (vLLM's route)."""
        return await server.unload_lora(request)


def _other_routes(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        """List the base model and its adapters."""
        return {"object": "list", "data": server.catalog.cards(server.max_model_len)}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """Describe one of the models that are served."""
        found = server.catalog.find(name)
        return next(card for card in server.catalog.cards(server.max_model_len) if card["id"] == found)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=_UNHEALTHY)
    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health/ready", responses=_UNHEALTHY)
    async def ready() -> dict[str, str]:
        """Answer 200 when requests are taken, 503 while the server starts, stops or hangs."""
        check_ready(server.worker, server.config.stall_timeout_s)
        return {"status": "ok"}

    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", responses=_UNHEALTHY)
    async def live() -> dict[str, str]:
        """Answer 200, or 503 when only a restart helps."""
        check_live(server.worker, server.config.stall_timeout_s)
        return {"status": "ok"}

    @app.get("/version", responses=_ERRORS)
    async def version() -> dict[str, str]:
        """Return the version of the server and the settings of the engine."""
        return {"version": server.version, "kernels": server.engine.kernels.name, "fingerprint": server.fingerprint}

    @app.get("/metrics", responses=_ERRORS)
    async def metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def playground() -> HTMLResponse:
        return HTMLResponse(
            PLAYGROUND.read_text(encoding="utf-8"),
            headers={
                "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
                "script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
            },
        )


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(VivaceError)
    async def ours(request: Request, error: VivaceError) -> JSONResponse:
        api_error = api_error_of(error)
        if api_error.status >= 500:
            log.error("%s: %s", request.state.request_id, error)
        return JSONResponse(api_error.body, api_error.status, headers=api_error.headers)

    @app.exception_handler(HTTPException)
    async def routes(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, headers=error.headers)
