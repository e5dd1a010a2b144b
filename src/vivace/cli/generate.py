"""``vivace generate``: answer a prompt; the text is shown while it is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import open_engine, stats_json
from vivace.errors import ConfigError
from vivace.prompts import Message, load_prompts, load_text

if TYPE_CHECKING:
    from vivace.answer import Alternative, Chunk, Result
    from vivace.engine import Engine

Request = str | list[Message] | list[int]


@options.grouped
def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt, or - for stdin.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="One prompt as text, or many as .jsonl (one JSON object a line).")
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option(help="The prompt as token ids; the answer is printed so too.", metavar="ID,ID,..."),
    ] = None,
    model: options.Model = None,
    method: options.Method = "auto",
    quality: options.Quality = None,
    load: options.LoadFlags,
    use: options.Use = None,
    soft_prompt: options.SoftPrompt = None,
    guard: options.GuardFiles = None,
    untrusted: options.Untrusted = None,
    store: options.StoreFlags,
    cache: options.PromptCacheFlags,
    ranks: options.ParallelFlags,
    reading: options.PrefillFlags,
    max_new_tokens: options.MaxNewTokens = None,
    raw: options.Raw = False,
    exact: options.Exact = False,
    sampling: options.SamplingFlags,
    beams: options.BeamFlags,
    as_json: options.AsJson = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: log p of every token.")] = False,
) -> None:
    """Answer a prompt; the text streams to stdout, notes go to stderr."""
    from vivace.options import Options

    if logprobs and not as_json:
        raise ConfigError("--logprobs has no effect without --json; add it, or leave --logprobs out")
    requests = read_requests(prompt, prompt_file, token_ids)
    if untrusted:
        requests = [_with_untrusted(request, untrusted, raw=raw) for request in requests]
    engine = open_engine(model, [method], load, store, cache, ranks, use=use, guard=guard, reads_sources=True)
    settings = options.given(
        max_new_tokens=max_new_tokens,
        method=method,
        adapter=use,
        soft_prompt=soft_prompt,
        quality=quality,
        raw=raw,
        exact=exact or None,
        logprobs=logprobs or None,
        **vars(reading),
        **vars(sampling),
        **beams.settings,
    )
    with console.progress("reading the prompt") as progress:
        settings["progress"] = progress
        plan = Options.of(settings).beams(engine.defaults)
        writes_one = len(requests) == 1 and (plan is None or plan.num_return_sequences == 1)
        if writes_one and not as_json and token_ids is None:
            stream_answer(engine, requests[0], settings)
            return
        results = engine.generate(requests, **settings)
    if as_json:
        stored: dict[str, Any] = {} if engine.storage is None else {"storage": engine.storage.facts}
        if engine.world is not None:
            stored["traffic"] = engine.world.traffic
        console.json({"results": [_result_json(result) for result in results], **stored})
        return
    for number, result in enumerate(results, 1):
        console.note(f"[{number}/{len(requests)}] {summary(result)}")
        found: tuple[Result | Alternative, ...] = (result, *result.alternatives)
        for one in found:
            score = f"{one.score:.4f}  " if result.alternatives else ""
            console.result(score + (one.text if token_ids is None else ",".join(map(str, one.token_ids))))


def read_requests(prompt: str | None, prompt_file: Path | None, token_ids: str | None = None) -> list[Request]:
    """Return the prompts that the command line names: the argument, standard input (``-``), a file, or token ids.

    Raises:
        ConfigError: there is no prompt or there are two, or the prompt is empty.
        NotFoundError: there is no such file.
    """
    if token_ids is not None:
        if prompt is not None or prompt_file is not None:
            raise ConfigError("expected a prompt as text or as --token-ids, found both")
        return [_read_ids(token_ids)]
    if (prompt is None) == (prompt_file is None):
        found = "neither" if prompt is None else "both"
        raise ConfigError(f"expected a prompt (or - for stdin) or --prompt-file, found {found}")
    if prompt_file is not None and {".jsonl", ".gz"} & set(prompt_file.suffixes):
        return [row.request for row in load_prompts(prompt_file)]
    text = load_text(prompt_file) if prompt_file is not None else sys.stdin.read() if prompt == "-" else prompt
    assert text is not None
    if not text.strip():
        raise ConfigError("the prompt is empty; give at least one character that is not white space")
    return [text.removesuffix("\n")]


def _with_untrusted(request: Request, paths: list[Path], *, raw: bool) -> Request:
    """Return a prompt followed by the texts of files, as messages of the role for material.

    Raises:
        ConfigError: the prompt is not written with the chat template.
        NotFoundError: there is no such file.
    """
    if raw or (not isinstance(request, str) and request and isinstance(request[0], int)):
        raise ConfigError("--untrusted needs the chat template; leave out --raw or --token-ids")
    messages: list[Message] = [{"role": "user", "content": request}] if isinstance(request, str) else list(request)  # type: ignore[arg-type]
    return messages + [{"role": "untrusted", "content": load_text(path)} for path in paths]


def stream_answer(engine: Engine, request: Request, settings: dict[str, Any]) -> Result | None:
    """Write an answer to stdout while it is made, and its statistics to stderr; return the result."""
    return show(engine.stream(request, **settings))


def show(chunks: Iterator[Chunk]) -> Result | None:
    """Write an answer to stdout as its parts come, and its statistics to stderr; return the result."""
    result = None
    for chunk in chunks:
        console.result(chunk.text, end="")
        result = chunk.result
    console.result("")
    if result is not None:
        console.note(summary(result))
    return result


def summary(result: Result) -> str:
    """Return the statistics of an answer on one line."""
    stats = result.stats
    line = f"{stats.num_tokens} tokens"
    if stats.num_tokens > stats.num_first_tokens:  # there is no speed after the first block where there is nothing
        line += f", {stats.tokens_per_s:.1f} tokens/s"
    if result.score is not None:
        line += f", beam score {result.score:.4f}"
    line += f", method {stats.method}"
    if stats.num_draft_tokens:
        line += (
            f", {stats.num_accepted_draft_tokens}/{stats.num_draft_tokens} drafted tokens accepted"
            f", {stats.tokens_per_target_pass:.2f} tokens per target pass"
        )
    if stats.num_cached_tokens:
        line += f", {stats.num_prompt_tokens - stats.num_cached_tokens} of {stats.num_prompt_tokens} prompt tokens read"
    if stats.prefill != "full":
        left = ", ".join(f"{count} from layer {layer} on" for layer, count in stats.prompt_kept)
        line += f", prefill {stats.prefill} (lossy): of {stats.num_prompt_tokens} prompt tokens {left or 'all'}"
    elif stats.prefill_reason:
        line += f", prefill full: {stats.prefill_reason}"
    if stats.prompt_pool is not None:
        line += f", soft prompt {stats.prompt_pool}"
    if stats.guard:
        line += f", guard: {', '.join(stats.guard)}"
    if stats.early_exit_share is not None:
        line += f", {stats.early_exit_share:.0%} left early, {stats.mean_exit_layer:.1f} layers a token"
    chosen = f"; auto: {result.choice}" if result.choice else ""
    return f"{line}, ended by {result.finish_reason}{chosen}"


def _read_ids(text: str) -> list[int]:
    """Return the token ids that are written with commas between them.

    Raises:
        ConfigError: one of them is not a number.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal()]
    if wrong:
        raise ConfigError(f"--token-ids has {wrong[0]!r}; write numbers with commas between them, such as 1,17,4")
    return [int(word) for word in words]


def _result_json(result: Result) -> dict[str, Any]:
    """Return a result as it is written to JSON."""
    found = [vars(one) | {"token_ids": list(one.token_ids)} for one in result.alternatives]
    searched = {} if result.score is None else {"score": result.score, "alternatives": found}
    return {
        "text": result.text,
        **searched,
        "token_ids": list(result.token_ids),
        "logprobs": None if result.logprobs is None else list(result.logprobs),
        "finish_reason": result.finish_reason,
        "method": result.method,
        "choice": result.choice,
        "stats": stats_json(result.stats),
    }
