"""vivace inside plain transformers: one argument of ``generate``, the module's own memory, the same decoding loop.

    model.generate(**inputs, custom_generate=vivace.custom_generate, method="multirate", adapter="DIR")

Everything that ``generate`` prepares is used: logits processors are applied at every drafted position,
stopping criteria after every token, and left padding is removed and put back. What is not supported (beams,
scores, attentions) is refused. ``transformers`` does not pass its ``streamer`` to a custom function, so
tokens cannot be streamed this way; use ``vivace.load(...).stream`` for that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vivace.checkpoint.share import share_module
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.decode.stats import DecodeStats
from vivace.errors import UnsupportedError
from vivace.methods.composition import Methods, adapters_by_method

_SHARED: WeakKeyDictionary[Any, tuple[tuple[int, ...], Methods]] = WeakKeyDictionary()
"""For each module, the addresses of its parameters and the methods over its decoder."""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
    stopping_criteria: Callable[[Tensor, Any], Tensor] | None = None,
    generation_config: Any = None,
    method: str = "auto",
    adapter: str | Path | None = None,
    **model_kwargs: Any,
) -> Any:
    """Generate text; pass this function as ``generate(custom_generate=...)``.

    Args:
        model: a transformers causal language model of a supported family.
        input_ids: (B, T), padded on the left.
        logits_processor: prepared by ``generate``; called with (1, S) ids and (1, V) scores.
        stopping_criteria: prepared by ``generate``; called with (1, S) ids.
        generation_config: prepared by ``generate``.
        method: how to decode, a name of ``vivace.methods.table.METHODS``.
        adapter: folder of the method's adapter; None looks beside the checkpoint.
        model_kwargs: arguments of the forward pass; only the attention mask is used.

    Returns:
        (B, T + new) ids padded on the right, or ``GenerateDecoderOnlyOutput`` with a further field
        ``speculation`` (one ``DecodeStats`` per row) when ``return_dict_in_generate`` is set.

    Raises:
        UnsupportedError: an output or strategy is not supported.
    """
    _refuse(generation_config)
    methods = _methods(model, adapter)
    mask = model_kwargs.get("attention_mask")
    padding = [0 if mask is None else int((mask[place] == 0).sum()) for place in range(len(input_ids))]
    seeds = torch.randint(0, 2**31, (len(input_ids),)).tolist()
    requests = [
        Request(
            tokens=tuple(ids[padded:].tolist()),
            max_new_tokens=generation_config.max_length - len(ids),
            drafter=methods.drafter(method),
            sampling=Sampling(do_sample=bool(generation_config.do_sample)),
            stop=StopRule(criterion=_criterion(stopping_criteria, ids)),
            seed=seeds[row],
            processors=tuple(_of_row(processor, row, ids[:padded]) for processor in logits_processor),
        )
        for row, (ids, padded) in enumerate(zip(input_ids, padding, strict=True))
    ]
    new, stats = _decode(methods.model, requests)
    return _output(input_ids, new, stats, generation_config)


def _refuse(config: Any) -> None:
    """Refuse a configuration with outputs or strategies that are not supported."""
    wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in wanted if getattr(config, name, False)]
    if (config.num_beams or 1) > 1:
        asked.append("num_beams")
    if asked:
        raise UnsupportedError(f"vivace.custom_generate does not do {', '.join(asked)}; leave it out")


def _methods(model: Any, adapter: str | Path | None) -> Methods:
    """Return the methods over a module's own memory, reused for as long as its parameters stay where they are."""
    addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
    name = getattr(model.config, "_name_or_path", "")
    folder = Path(name) if name and Path(name).is_dir() else None
    adapters = {} if adapter is None else adapters_by_method([adapter], folder)
    known = _SHARED.get(model)
    if known is None or known[0] != addresses or known[1].adapters != adapters:
        known = _SHARED[model] = (addresses, Methods(share_module(model), folder, adapters))
    return known[1]


def _of_row(processor: Any, row: int, padding: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a prepared processor for one row of the batch; it is called with the row's padding put in front."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):  # one number per row of the batch
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    return lambda ids, scores: processor(torch.cat((padding[None].to(ids), ids), 1), scores)


def _criterion(
    criteria: Callable[[Tensor, Any], Tensor] | None, prompt: Tensor
) -> Callable[[Sequence[int]], bool] | None:
    """Return a function that applies transformers' stopping criteria to the prompt with some new tokens."""
    if criteria is None:
        return None
    return lambda new: bool(criteria(torch.cat((prompt, prompt.new_tensor(new)))[None], None).any())


def _decode(model: Decoder, requests: Sequence[Request]) -> tuple[list[list[int]], list[DecodeStats]]:
    """Decode the requests together; return the new tokens and the statistics of each."""
    capacity = max(len(r.tokens) + r.max_new_tokens for r in requests)
    session = Session(model, num_slots=len(requests), capacity=capacity)
    for request in requests:
        session.admit(request)
    new: list[list[int]] = [[] for _ in requests]
    stats = [DecodeStats() for _ in requests]
    for emitted in session.drain():
        new[emitted.request_id] += emitted.tokens
        stats[emitted.request_id] = emitted.stats
    return new, stats


def _output(input_ids: Tensor, new: list[list[int]], stats: list[DecodeStats], config: Any) -> Any:
    """Return the ids with the new tokens, in the form that the configuration asks for."""
    longest = max(map(len, new))
    pad = config._pad_token_tensor
    filler = 0 if pad is None else int(pad)
    tails = torch.tensor([row + [filler] * (longest - len(row)) for row in new], device=input_ids.device)
    sequences = torch.cat((input_ids, tails), 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    result = GenerateDecoderOnlyOutput(sequences=sequences)
    result["speculation"] = stats
    return result
