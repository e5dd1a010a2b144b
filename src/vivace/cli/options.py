"""Flags that several commands share, and the conversion of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from vivace.errors import ConfigError
from vivace.files import check_writable
from vivace.prefill.table import PREFILLS

_SAMPLING = "Sampling"
_MODEL = "Model"
_PROMPT = "Prompt"
_BEAMS = "Beam search"
_RANKS = "Several machines"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Folder, Hub id or GGUF file (also ID:FILE.gguf); left out: the model that ships.",
        rich_help_panel=_MODEL,
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        help="Folder of draft weights, or of a LoRA (PEFT), repeatable.",
        metavar="[NAME=]DIR",
        rich_help_panel=_MODEL,
    ),
]
Use = Annotated[
    str | None,
    typer.Option("--use", help="The LoRA that answers wear, by its name.", metavar="NAME", rich_help_panel=_MODEL),
]
DraftModel = Annotated[
    Path | None, typer.Option("--draft-model", help="Small model that drafts (method draft).", rich_help_panel=_MODEL)
]
Method = Annotated[str, typer.Option("--method", help="How to decode.", rich_help_panel=_MODEL)]
Quality = Annotated[
    float | None,
    typer.Option(
        help="Agreement of the tokens that leave early (method dynamic): 0.9, 0.95, 0.98 or 0.99.",
        rich_help_panel=_MODEL,
    ),
]
IgnoreConfigKey = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-config-key",
        help="Unknown key of config.json that changes nothing, repeatable.",
        metavar="KEY",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto (the CPU), cpu or cuda.", rich_help_panel=_MODEL)]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (the checkpoint's), float32 or bfloat16.", rich_help_panel=_MODEL)
]
Kernels = Annotated[
    str, typer.Option("--kernels", help="auto, torch, avx2, avx512, amx or graphs (a GPU).", rich_help_panel=_MODEL)
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="bf16 (as stored), exact12 (the same in 12 bits), int8, q4, lut4, lut3, lut2: rounded while loading.",
        rich_help_panel=_MODEL,
    ),
]
ScreenedHead = Annotated[
    bool | None,
    typer.Option(
        "--screened-head/--no-screened-head",
        help="Keep the head in int8 too, so that greedy decoding reads half of it; left out: for large heads.",
        rich_help_panel=_MODEL,
    ),
]
Recovery = Annotated[
    bool,
    typer.Option(
        "--recovery/--no-recovery",
        help="Wear MODEL/adapters/recovery where it is: what few bits have lost, won back.",
        rich_help_panel=_MODEL,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="For weights, drafters, keys and values together, such as 2GiB; texts wait for room. The rest of a store "
        "is read while it is used.",
        metavar="SIZE",
        rich_help_panel=_MODEL,
    ),
]
PromptPool = Annotated[
    Path | None,
    typer.Option(
        "--prompt-pool",
        help="Folder of soft prompts, of which each prompt gets one (`vivace train prompts`).",
        metavar="DIR",
        rich_help_panel=_MODEL,
    ),
]
SoftPrompt = Annotated[
    str | None,
    typer.Option(
        "--soft-prompt",
        help="The one of them that all prompts get, or none; left out: what the first layer chooses.",
        metavar="NAME",
        rich_help_panel=_MODEL,
    ),
]
GuardFiles = Annotated[
    Path | None,
    typer.Option(
        "--guard",
        help="What judges prompts and answers: a file of rules, or the folder of `vivace train guard`.",
        metavar="DIR|FILE",
        rich_help_panel=_MODEL,
    ),
]
Untrusted = Annotated[
    list[Path] | None,
    typer.Option(
        "--untrusted",
        help="A text file to be worked on, whose instructions are not to be followed, repeatable.",
        metavar="FILE",
    ),
]
Reader = Annotated[
    str, typer.Option(help="How a store is read: auto, direct, buffered or mmap.", rich_help_panel=_MODEL)
]
Remember = Annotated[
    bool,
    typer.Option(
        "--remember/--no-remember",
        help="Keep what auto measures for later runs, in a small file of the cache folder.",
        rich_help_panel=_MODEL,
    ),
]
KeyValues = Annotated[
    str,
    typer.Option(
        "--kv",
        help="Keys and values of texts: same (as weights), or int8: half the memory, lossy.",
        rich_help_panel=_MODEL,
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        "--attention",
        help="What is kept of a source (models with an encoder): shared (keys and values of each layer), el (the "
        "encoder's states, once), auto: shared unless --memory is too little for it.",
        rich_help_panel=_MODEL,
    ),
]
PromptCache = Annotated[
    Path | None,
    typer.Option(
        help="Folder that keeps texts that were read or written, so that they are not read again, now or after a "
        "restart.",
        metavar="DIR",
        rich_help_panel=_MODEL,
    ),
]
PromptCacheReadOnly = Annotated[
    bool, typer.Option("--prompt-cache-ro", help="Find texts there and add none.", rich_help_panel=_MODEL)
]
PromptCacheBytes = Annotated[
    str | None,
    typer.Option(
        help="Most bytes of that folder; the least recently used leave. Left out: 4GiB.",
        metavar="SIZE",
        rich_help_panel=_MODEL,
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(
        help="Under torchrun, how its processes share the work: tensor (each a part of every layer), pipeline (each "
        "some of the layers), runahead (each a piece of every prompt; the first one decodes), runahead-tensor (prompts "
        "as runahead, answers as tensor), or auto (what is soonest, for each prompt).",
        metavar="MODE",
        rich_help_panel=_RANKS,
    ),
]
Wire = Annotated[
    str | None,
    typer.Option(
        help="How they send the sums of tensor: bf16, int8, or with a calibration int4 or lowbit (FORM=DIR names its "
        "folder), all lossy; left out: as they are.",
        metavar="FORM",
        rich_help_panel=_RANKS,
    ),
]
LinkInterface = Annotated[
    str | None,
    typer.Option(
        help="Network interface through which they talk, in the clear; left out: loopback.",
        metavar="NAME",
        rich_help_panel=_RANKS,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds without an answer after which a process is said to hang; left out: 120.", rich_help_panel=_RANKS
    ),
]
Prefill = Annotated[
    str | None,
    typer.Option(
        help=f"How prompts are read: {', '.join(PREFILLS)}; all but full are lossy. Left out: full.",
        rich_help_panel=_PROMPT,
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        help="How many tokens go on: paper, balanced, fast, or LAYER:SHARE[:SCORE],... such as 9:0.5,18:0.5.",
        metavar="SCHEDULE",
        rich_help_panel=_PROMPT,
    ),
]
MinPrompt = Annotated[
    int | None,
    typer.Option(help="Shortest prompt of which tokens are left out; left out: 512.", rich_help_panel=_PROMPT),
]
DecodeKeep = Annotated[
    str | None,
    typer.Option(
        help="What each new token reads: a share, or same for the shares of --keep; tokens left out may come back.",
        metavar="SHARE",
        rich_help_panel=_PROMPT,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", help="Longest answer, in tokens; left out: what the checkpoint says, or 256."),
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Equal row counts in every pass; slower, for machines that need it.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

DoSample = Annotated[
    bool | None,
    typer.Option("--do-sample/--greedy", help="Draw tokens or take the likeliest.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[float | None, typer.Option("--temperature", rich_help_panel=_SAMPLING)]
TopP = Annotated[float | None, typer.Option("--top-p", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option("--top-k", rich_help_panel=_SAMPLING)]
MinP = Annotated[float | None, typer.Option("--min-p", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[float | None, typer.Option("--repetition-penalty", rich_help_panel=_SAMPLING)]
NoRepeatNgramSize = Annotated[int | None, typer.Option("--no-repeat-ngram-size", rich_help_panel=_SAMPLING)]
StopStrings = Annotated[
    list[str] | None,
    typer.Option("--stop-strings", help="Text that ends the answer, repeatable.", rich_help_panel=_SAMPLING),
]
MinNewTokens = Annotated[
    int | None, typer.Option(help="Shortest answer, in tokens; left out: what the checkpoint says, or 0.")
]
NumBeams = Annotated[
    int | None,
    typer.Option(
        help="Texts that are written at the same time to find the likeliest; left out: what the checkpoint says, or 1.",
        rich_help_panel=_BEAMS,
    ),
]
LengthPenalty = Annotated[
    float | None, typer.Option(help="Above 0: longer texts score better; left out: 1.", rich_help_panel=_BEAMS)
]
EarlyStopping = Annotated[
    str | None,
    typer.Option(
        help="Stop with as many finished texts as beams (true), when no beam seems to become better (false), or when "
        "none can (never).",
        metavar="true|false|never",
        rich_help_panel=_BEAMS,
    ),
]
NumReturnSequences = Annotated[
    int | None, typer.Option(help="Number of texts that are returned; left out: 1.", rich_help_panel=_BEAMS)
]
ForcedBos = Annotated[
    str | None,
    typer.Option(
        "--forced-bos-token-id",
        help="First new token, as an id or spelt as the tokenizer has it, such as fra_Latn: the target language.",
        metavar="ID|TOKEN",
    ),
]


def _writable(target: Path | None) -> Path | None:
    """Refuse a report that could not be written once everything is measured."""
    if target is not None and str(target) != "-":
        check_writable(target)
    return target


ReportFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the results there; - prints them.", metavar="OUT", callback=_writable),
]
Seed = Annotated[int | None, typer.Option("--seed", rich_help_panel=_SAMPLING)]


@dataclass(frozen=True)
class LoadFlags:
    """Flags that choose how a model is loaded; ``grouped`` makes one flag of each field."""

    adapter: Adapter = None
    draft_model: DraftModel = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    kernels: Kernels = "auto"
    weights: Weights = "bf16"
    screened_head: ScreenedHead = None
    recovery: Recovery = True
    ignore_config_key: IgnoreConfigKey = None
    kv: KeyValues = "same"
    attention: Attention = "auto"
    prompt_pool: PromptPool = None
    remember: Remember = True


@dataclass(frozen=True)
class StoreFlags:
    """Flags that choose how much of a model is in memory, and how the rest is read."""

    memory: Memory = None
    reader: Reader = "auto"


@dataclass(frozen=True)
class PromptCacheFlags:
    """Flags that choose where texts are kept on disk."""

    prompt_cache: PromptCache = None
    prompt_cache_ro: PromptCacheReadOnly = False
    prompt_cache_bytes: PromptCacheBytes = None


@dataclass(frozen=True)
class ParallelFlags:
    """Flags that say how several processes share a model."""

    parallel: Parallel = None
    wire: Wire = None
    link_interface: LinkInterface = None
    timeout: Timeout = None


@dataclass(frozen=True)
class PrefillFlags:
    """Flags that choose how prompts are read."""

    prefill: Prefill = None
    keep: Keep = None
    min_prompt: MinPrompt = None
    decode_keep: DecodeKeep = None


@dataclass(frozen=True)
class SamplingFlags:
    """Flags that choose how tokens are sampled and where an answer ends."""

    do_sample: DoSample = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    no_repeat_ngram_size: NoRepeatNgramSize = None
    stop_strings: StopStrings = None
    seed: Seed = None


@dataclass(frozen=True)
class BeamFlags:
    """Flags that choose how the likeliest text is searched for."""

    min_new_tokens: MinNewTokens = None
    num_beams: NumBeams = None
    length_penalty: LengthPenalty = None
    early_stopping: EarlyStopping = None
    num_return_sequences: NumReturnSequences = None
    forced_bos_token_id: ForcedBos = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options of generation by name.

        Raises:
            ConfigError: early stopping is neither true, false nor never.
        """
        kinds: dict[str | None, bool | str | None] = {None: None, "true": True, "false": False, "never": "never"}
        if self.early_stopping not in kinds:
            raise ConfigError(f"--early-stopping is {self.early_stopping!r}; write true, false or never")
        first = self.forced_bos_token_id
        return {
            **vars(self),
            "early_stopping": kinds[self.early_stopping],
            "forced_bos_token_id": int(first) if first is not None and first.isdecimal() else first,
        }


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command whose type is a group of flags by the fields of that group.

    typer reads the flags of a command from its signature. The returned function has one parameter for each field, and
    calls ``command`` with the groups put together.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            kinds = get_type_hints(groups[name], include_extras=True)
            flags = [(field.name, field.default, kinds[field.name]) for field in fields(groups[name])]
        else:
            flags = [(name, parameter.default, hints[name])]
        parameters += [Parameter(flag, Parameter.KEYWORD_ONLY, default=d, annotation=kind) for flag, d, kind in flags]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def given(**flags: Any) -> dict[str, Any]:
    """Return the flags that were given, so that the model's own defaults apply to the others."""
    return {name: value for name, value in flags.items() if value is not None and value != []}


def parse_adapters(words: list[str] | None) -> str | dict[str, str] | None:
    """Turn ``["DIR"]`` into ``"DIR"`` and ``["a=DIR", ...]`` into ``{"a": "DIR", ...}``.

    Where there are several folders, the name of a folder is used if no other is given.

    Raises:
        ConfigError: a name or folder is empty, or a name is given twice.
    """
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    adapters: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals:
            name, folder = Path(word).name, word
        if not name or not folder:
            raise ConfigError(f"--adapter {word!r}: expected [NAME=]DIR")
        if name in adapters:
            raise ConfigError(f"--adapter {word!r}: the name {name!r} is taken by {adapters[name]}; write NAME=DIR")
        adapters[name] = folder
    return adapters
