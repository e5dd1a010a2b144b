"""vivace inside plain transformers: one argument of ``generate``, the module's weights, the same decoding loop.

    model.generate(**inputs, custom_generate=vivace.custom_generate, method="multirate", adapter="DIR")

Where native kernels run a module of this dtype, its matrices are laid out for them once and kept for as long as the
module lives; the embedding, a head tied to it, the norms and the biases share its memory. They are laid out anew when
a parameter has changed in any way. Other modules run on PyTorch, over their own memory. Both is said once (``log``).

Everything that ``generate`` prepares is used: logits processors are applied at every drafted position,
stopping criteria after every token, and left padding is removed and put back. With ``num_beams`` the rows that
``generate`` has repeated for each beam are taken once. What is not supported (sampling with beams, attentions, the
scores of single steps) is refused. ``generate`` does not pass its ``streamer`` to a custom function; one for a single
row is given as ``stream`` instead.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vivace.checkpoint.load import choose_dtype
from vivace.checkpoint.share import Fingerprint, pack_module, share_module
from vivace.core.cpu.backend import backend_of
from vivace.core.footprint import held_bytes
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.decode.beams import BeamPlan, Hypothesis
from vivace.decode.prefill import Prefill
from vivace.decode.request import Emitted, Request, StopRule
from vivace.decode.session import Session
from vivace.decode.stats import DecodeStats
from vivace.errors import UnsupportedError
from vivace.kernels.choice import KernelChoice, choose
from vivace.methods.composition import Methods, adapters_by_method
from vivace.methods.table import check_method
from vivace.prefill.choice import Prefills
from vivace.prefill.table import Reading
from vivace.units import format_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Known:
    """What is kept for a module from call to call."""

    methods: Methods
    kernels: str
    """The kernels that were asked for."""
    places: list[tuple[object, ...]]
    """Where its parameters were."""
    fingerprint: Fingerprint | None
    """What they were, where the decoder has copies of them."""
    prefills: Prefills
    """Ways to read prompts."""

    def fits(self, model: Any, kernels: str, adapters: dict[str, Path]) -> bool:
        """Return whether it still can be used: for a module whose parameters have not changed."""
        is_asked = self.kernels == kernels and self.methods.adapters == adapters
        if not is_asked or self.places != _places(model):
            return False
        return self.fingerprint is None or self.fingerprint.is_of(model)


_KNOWN: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
"""What is kept for each module that is alive."""
_TOLD: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""What was said of each of them."""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
    stopping_criteria: Callable[[Tensor, Any], Tensor] | None = None,
    generation_config: Any = None,
    method: str = "auto",
    adapter: str | Path | None = None,
    kernels: str = "auto",
    stream: Any = None,
    prefill: str = "full",
    keep: str | None = None,
    min_prompt: int | None = None,
    decode_keep: str | float | None = None,
    **model_kwargs: Any,
) -> Any:
    """Generate text; pass this function as ``generate(custom_generate=...)``.

    Args:
        model: a causal language model, or an encoder-decoder model, of a supported family of transformers.
        input_ids: (B, T), padded on the left; of an encoder-decoder model what the decoder begins with.
        logits_processor: prepared by ``generate``; called with (1, S) ids and (1, V) scores.
        stopping_criteria: prepared by ``generate``; called with (1, S) ids.
        generation_config: prepared by ``generate``.
        method: how to decode, a name of ``vivace.methods.table.METHODS``.
        adapter: folder of the method's adapter; None looks beside the checkpoint.
        kernels: as for ``vivace.load``; "torch" lays out nothing and takes no memory for weights.
        stream: a streamer of transformers (``TextStreamer``, ``TextIteratorStreamer``), for one row: new tokens are put
            into it as they come. ``generate`` does not hand its own argument ``streamer`` to a custom function.
        prefill: how prompts are read; lossy with anything but "full", as for ``Engine.generate``.
        keep: how many of their tokens go on then.
        min_prompt: shortest prompt of which tokens are left out.
        decode_keep: share of the tokens that each new one reads, while those left out may come back.
        model_kwargs: arguments of the forward pass: attention masks and the encoder's output; others that would change
            it are refused.

    Returns:
        (B, T + new) ids padded on the right, or ``GenerateDecoderOnlyOutput`` with a further field
        ``speculation`` (one ``DecodeStats`` per row) when ``return_dict_in_generate`` is set.

    Raises:
        UnsupportedError: an output, strategy or argument is not supported, or the module has forward hooks.
    """
    beams = _beams(generation_config)
    _refuse_inputs(model_kwargs)
    _refuse_hooks(model)
    _refuse(generation_config, beams)
    method = _method(model, method, beams)
    batch = _Called.of(model, input_ids, 1 if beams is None else beams.num_beams, model_kwargs)
    if stream is not None and len(batch.input_ids) > 1:
        count = len(batch.input_ids)
        raise UnsupportedError(f"stream takes the tokens of one row, and there are {count}; leave it out")
    methods = _methods(model, adapter, kernels)
    if _has_encoder(model) and any(batch.padding) and methods.model.config.positions != "relative":
        raise UnsupportedError(
            "decoder_attention_mask has zeros, and this model counts positions from the first token; pass texts of one "
            "length without padding"
        )
    criteria = _Criteria.of(stopping_criteria)
    prefills = _prefills(model, Reading(prefill, keep, min_prompt, decode_keep), batch, method, beams)
    seeds = torch.randint(0, 2**31, (len(batch.input_ids),)).tolist()
    requests = [
        Request(
            tokens=tuple(ids[padded:].tolist()),
            max_new_tokens=min(generation_config.max_length, criteria.max_length) - len(ids),
            drafter=way.drafter or methods.drafter(method),
            prefill=way,
            prefill_reason=reason,
            sampling=Sampling(do_sample=bool(generation_config.do_sample)),
            stop=StopRule(end_tokens=criteria.end_tokens, criterion=criteria.criterion(ids)),
            seed=seeds[row],
            processors=tuple(
                _of_row(processor, row * batch.width, len(input_ids), ids, padded) for processor in logits_processor
            ),
            beams=beams,
            source=batch.sources[row],
        )
        for row, (ids, padded, (way, reason)) in enumerate(zip(batch.input_ids, batch.padding, prefills, strict=True))
    ]
    if stream is not None:
        stream.put(batch.input_ids.cpu())
    new, last = _decode(methods.model, requests, stream)
    if stream is not None:
        stream.end()
    stats = [one.stats for one in last]
    if beams is None:
        return _output(batch.input_ids, new, stats, generation_config, has_encoder=_has_encoder(model))
    found = [one for each in last for one in _filled(each.hypotheses, beams.num_return_sequences)]
    repeated = batch.input_ids.repeat_interleave(beams.num_return_sequences, 0)
    texts, scores = [list(one.tokens) for one in found], [one.score for one in found]
    return _output(repeated, texts, stats, generation_config, scores, has_encoder=_has_encoder(model))


@dataclass(frozen=True)
class _Called:
    """What ``generate`` has prepared, without the copies of each row that it makes for beams."""

    input_ids: Tensor
    """(B, T), padded on the left."""
    width: int
    """Number of rows that ``generate`` has made of each."""
    padding: Sequence[int]
    """Number of padding tokens of each row."""
    sources: Sequence[Tensor | None]
    """Of each row, what the encoder has made of its source, where there is an encoder."""

    @staticmethod
    def of(model: Any, input_ids: Tensor, width: int, prepared: dict[str, Any]) -> _Called:
        """Take every ``width``-th row; ``prepared`` has attention masks and the encoder's output."""
        rows = input_ids[::width]
        name = "decoder_attention_mask" if _has_encoder(model) else "attention_mask"
        mask = prepared.get(name)
        if mask is not None and bool((mask.long().diff() < 0).any()):
            raise UnsupportedError(f"{name} has zeros behind ones; pad prompts on the left (padding_side='left')")
        padding = [0 if mask is None else int((mask[place * width] == 0).sum()) for place in range(len(rows))]
        sources = _sources(prepared, width) if _has_encoder(model) else [None] * len(rows)
        return _Called(rows, width, padding, sources)


def _method(model: Any, asked: str, beams: BeamPlan | None) -> str:
    """Return the method asked for; beams and texts behind an encoder are decoded plainly, and others are refused."""
    if beams is None and not _has_encoder(model):
        return asked
    if asked not in ("auto", "plain"):
        what = "there are beams" if beams is not None else "the model has an encoder"
        raise UnsupportedError(f"method {asked} drafts for one text of a decoder, and {what}; leave out one of them")
    return "plain"


def _prefills(
    model: Any, reading: Reading, batch: _Called, method: str, beams: BeamPlan | None
) -> list[tuple[Prefill, str | None]]:
    """Return for each row how its prompt is read, and why so where there was a choice."""
    choice = _KNOWN[model].prefills
    lengths = [len(ids) - padded for ids, padded in zip(batch.input_ids, batch.padding, strict=True)]
    found = [choice.of(reading, length) for length in lengths]
    is_pruned_for_one = any(way.drafter for way, _ in found)
    if beams is not None and is_pruned_for_one:
        raise UnsupportedError("decode_keep prunes for one text, and there are beams; leave out one of them")
    if reading.name != "full":
        check_method(method, reading.name, is_alone=is_pruned_for_one)
    return found


def _has_encoder(model: Any) -> bool:
    """Return whether a module has an encoder, whose output ``generate`` has prepared."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _sources(prepared: dict[str, Any], width: int) -> list[Tensor | None]:
    """Return what the encoder has made of each source, without padding; rows repeated for beams are let go."""
    outputs = prepared.pop("encoder_outputs")
    states, mask = outputs.last_hidden_state[::width].clone(), prepared.get("attention_mask")
    outputs.last_hidden_state = states
    if mask is None:
        return list(states)
    return [own[rows.bool()] for own, rows in zip(states, mask[::width], strict=True)]


def _beams(config: Any) -> BeamPlan | None:
    """Return the search that a configuration asks for."""
    if (config.num_beams or 1) == 1:
        return None
    penalty = 1.0 if config.length_penalty is None else float(config.length_penalty)
    return BeamPlan(config.num_beams, config.num_return_sequences or 1, penalty, config.early_stopping or False)


def _refuse(config: Any, beams: BeamPlan | None) -> None:
    """Refuse a configuration with outputs or strategies that are not supported."""
    wanted = ["output_logits", "output_attentions", "output_hidden_states"]
    if beams is None or not config.return_dict_in_generate:  # of a search these are the scores of whole texts
        wanted.append("output_scores")
    asked = [name for name in wanted if getattr(config, name, False)]
    asked += ["guidance_scale"] if (getattr(config, "guidance_scale", None) or 1) != 1 else []
    drafting = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    asked += [name for name in (*drafting, "dola_layers") if getattr(config, name, None)]
    is_contrastive = getattr(config, "penalty_alpha", None) and (config.top_k or 0) > 1
    asked += ["penalty_alpha"] if is_contrastive and beams is None and not config.do_sample else []
    if beams is not None:
        asked += [name for name in ("do_sample", "constraints", "force_words_ids") if getattr(config, name, None)]
        asked += [name for name in ("num_beam_groups",) if (getattr(config, name, None) or 1) > 1]
        asked = [f"{name} with num_beams" for name in asked]
    if asked:
        raise UnsupportedError(f"vivace.custom_generate does not do {', '.join(asked)}; leave it out")


def _refuse_inputs(prepared: Mapping[str, Any]) -> None:
    """Refuse arguments of a forward pass that would change the text and that nothing here looks at."""
    mask, cache, positions = (prepared.get(name) for name in ("attention_mask", "past_key_values", "position_ids"))
    asked = [name for name in ("inputs_embeds", "decoder_inputs_embeds") if prepared.get(name) is not None]
    asked += ["past_key_values"] if cache is not None and cache.get_seq_length() else []
    if positions is not None:
        read = torch.ones_like(positions) if mask is None else mask[:, -positions.shape[1] :].long()
        asked += ["position_ids"] if bool(((positions - read.cumsum(1) + 1) * read).any()) else []
    for name, value in prepared.items():
        if isinstance(value, Tensor) and name not in _LOOKED_AT and bool(value.any()):
            asked.append(name)
    if asked:
        raise UnsupportedError(f"vivace.custom_generate does not take {', '.join(asked)}; leave it out")


_LOOKED_AT = {"attention_mask", "decoder_attention_mask", "position_ids", "inputs_embeds", "decoder_inputs_embeds"}
"""Tensors that a forward pass may be given, of which the masks are used and the others refused where they matter."""


def _refuse_hooks(model: Any) -> None:
    """Refuse a module whose forward passes call a user's functions, since none of its forward passes are run."""
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            raise UnsupportedError(f"{name or 'the module'} has forward hooks, which are not called; remove them")


def _filled(found: Sequence[Hypothesis], count: int) -> list[Hypothesis]:
    """Return the texts of a search, the last one repeated where fewer could be found than asked for."""
    last = found[-1] if found else Hypothesis((), _NO_TEXT, is_stopped=False)
    return [*found, *[last._replace(score=_NO_TEXT)] * (count - len(found))]


_NO_TEXT = -1e9
"""Score that transformers gives in place of a text that could not be found."""


def _methods(model: Any, adapter: str | Path | None, kernels: str) -> Methods:
    """Return the methods over a module's weights, kept for as long as these do not change."""
    name = getattr(model.config, "_name_or_path", "")
    folder = Path(name) if name and Path(name).is_dir() else None
    adapters = {} if adapter is None else adapters_by_method([adapter], folder)
    known = _KNOWN.get(model)
    if known is None or not known.fits(model, kernels, adapters):
        del known
        _KNOWN.pop(model, None)  # before memory is taken again
        decoder, fingerprint = _decoder(model, kernels)
        made = Methods(decoder, folder, adapters), kernels, _places(model), fingerprint, Prefills(decoder, folder)
        _KNOWN[model] = _Known(*made)
    return _KNOWN[model].methods


def _places(model: Any) -> list[tuple[object, ...]]:
    """Return where each parameter of a module is, and in which form."""
    return [(p.data_ptr(), p.dtype, p.device) for p in model.parameters()]


def _decoder(model: Any, kernels: str) -> tuple[Decoder, Fingerprint | None]:
    """Return a decoder with a module's weights, and what these were if the decoder has copies of them."""
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    own, device = min(kinds, key=str)
    dtype = choose_dtype("auto", own, torch.device(device))
    choice = choose("torch" if device != "cpu" and kernels == "auto" else kernels, device=torch.device(device))
    backend = backend_of(choice.body, "bf16", dtype, is_required=kernels != "auto")
    if backend is None or len(kinds) > 1:
        if kernels == "auto":
            _tell(model, f"the module runs on PyTorch's kernels: {_why_not_native(choice, kinds)}")
        return share_module(model), None
    fingerprint = Fingerprint(model)
    decoder = pack_module(model, backend, dtype)
    size = format_bytes(held_bytes(model, decoder)[1])
    _tell(model, f"the module runs on {choice.name} kernels; its weights laid out for them take {size} beside its own")
    return decoder, fingerprint


def _why_not_native(choice: KernelChoice, kinds: set[tuple[torch.dtype, str]]) -> str:
    if len(kinds) > 1:
        return "its parameters are " + " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
    return choice.reason if choice.body is None else f"there are none of ours for {min(kinds)[0]}"


def _tell(model: Any, what: str) -> None:
    """Log what is worth knowing of a module, once."""
    told = _TOLD.setdefault(model, set())
    if what not in told:
        told.add(what)
        log.warning(what)


def _of_row(processor: Any, row: int, num_rows: int, prompt: Tensor, padded: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a prepared processor for one of ``num_rows`` rows of the batch, those repeated for beams counted; it is
    called with the ``padded`` tokens of padding put in front with which the row's prompt begins.
    """
    from transformers import generation

    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):  # one number per row of the batch
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    if isinstance(processor, generation.PrefixConstrainedLogitsProcessor):  # its function is told the row
        allowed, place = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        processor = generation.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(place, ids), 1)
    if isinstance(processor, generation.EncoderRepetitionPenaltyLogitsProcessor):  # it has the ids of all sources
        processor, every = copy.copy(processor), processor.encoder_input_ids
        place = row * len(every) // num_rows
        processor.encoder_input_ids = every[place : place + 1]
    if isinstance(processor, generation.EncoderNoRepeatNGramLogitsProcessor):  # it has the n-grams of all sources
        place = row * processor.batch_size // num_rows
        processor = copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = processor.generated_ngrams[place : place + 1], 1
    if isinstance(processor, generation.SynthIDTextWatermarkLogitsProcessor):  # it remembers the last call
        processor = _Watermark(processor, len(prompt))
    padding = prompt[None, :padded]
    return lambda ids, scores: processor(torch.cat((padding.to(ids), ids), 1), scores)


class _Watermark:
    """A SynthID watermark of one row, which takes each call for the next token of the text before.

    Calls of drafted tokens may be for others, so what it remembers is kept after each token.
    """

    def __init__(self, processor: Any, num_prompt: int) -> None:
        self._processor = copy.copy(processor)
        self._num_prompt = num_prompt
        self._tokens: list[int] = []
        self._states: list[Any] = []
        """By number of new tokens, what it remembered when it had been called behind them."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        tokens = ids[0, self._num_prompt :].tolist()
        pairs = enumerate(zip(tokens, self._tokens, strict=False))
        num_same = next((at for at, (new, old) in pairs if new != old), min(len(tokens), len(self._tokens)))
        del self._states[min(num_same + 1, len(tokens)) :]
        self._tokens, marked = tokens, scores
        for count in range(len(self._states), len(tokens) + 1):
            self._processor.state = copy.copy(self._states[-1]) if self._states else None
            marked = self._processor(ids[:, : self._num_prompt + count], scores)
            self._states.append(self._processor.state)
        return marked


@dataclass(frozen=True)
class _Criteria:
    """Stopping criteria of transformers: the two that nearly every call has as numbers, since calling them after each
    token takes as long as a small model; all others as they are.
    """

    max_length: int
    end_tokens: frozenset[int]
    others: Callable[[Tensor, Any], Tensor] | None

    @staticmethod
    def of(criteria: Any) -> _Criteria:
        """Sort the criteria that ``generate`` has prepared."""
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

        if criteria is None or not isinstance(criteria, StoppingCriteriaList):
            return _Criteria(sys.maxsize, frozenset(), criteria)
        lengths = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
        ends = [each.eos_token_id.tolist() for each in criteria if type(each) is EosTokenCriteria]
        others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
        kept = StoppingCriteriaList(others) if others else None
        return _Criteria(min(lengths, default=sys.maxsize), frozenset(token for some in ends for token in some), kept)

    def criterion(self, prompt: Tensor) -> Callable[[Sequence[int]], bool] | None:
        """Return a function that applies the other criteria to the prompt with some new tokens."""
        others = self.others
        if others is None:
            return None
        return lambda new: bool(others(torch.cat((prompt, prompt.new_tensor(new)))[None], None).any())


def _decode(model: Decoder, requests: Sequence[Request], stream: Any = None) -> tuple[list[list[int]], list[Emitted]]:
    """Decode the requests together, put new tokens into the stream, if any, and return them and the last event of each
    request.

    Raises:
        CapacityError: a prompt and its answer have more tokens than there are learned positions.
    """
    if model.config.positions == "learned":
        for request in requests:
            request.check_fits(model.config.max_positions)
    capacity = max(r.num_entries for r in requests)
    session = Session(model, num_slots=len(requests), capacity=capacity)
    for request in requests:
        session.admit(request)
    new: list[list[int]] = [[] for _ in requests]
    last: dict[int, Emitted] = {}
    for emitted in session.drain():
        new[emitted.request_id] += emitted.tokens
        if stream is not None and emitted.tokens:
            stream.put(torch.tensor(emitted.tokens))
        last[emitted.request_id] = emitted
    return new, [last[number] for number in range(len(requests))]


def _output(
    input_ids: Tensor,
    new: list[list[int]],
    stats: list[DecodeStats],
    config: Any,
    scores: list[float] | None = None,
    *,
    has_encoder: bool,
) -> Any:
    """Return the ids with the new tokens, in the form that the configuration asks for."""
    longest = max(map(len, new))
    pad = config._pad_token_tensor
    filler = 0 if pad is None else int(pad)
    if scores is not None:  # as a beam search of transformers fills up
        ends = config._eos_token_tensor
        filler = -1 if ends is None else filler or int(ends[0])
    tails = torch.tensor([row + [filler] * (longest - len(row)) for row in new], device=input_ids.device)
    sequences = torch.cat((input_ids, tails), 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers import generation

    kind = "EncoderDecoder" if has_encoder else "DecoderOnly"
    if scores is None:
        result = getattr(generation, f"Generate{kind}Output")(sequences=sequences)
    else:
        result = getattr(generation, f"GenerateBeam{kind}Output")(
            sequences=sequences, sequences_scores=torch.tensor(scores)
        )
    result["speculation"] = stats
    return result
