"""Write the parts of the documents that follow from the code: ``python -m tools.write_docs`` (``--check`` only
compares).

Method table, families, rotary kinds, error tree, commands, fields of configurations and the picture of the rooms
are read from the code, so that no page can contradict it. A test runs this with ``--check``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import typer

from tests import published_checkpoints
from tests.test_architecture import FLOORS, PACKAGE
from tools import rooms
from tools.blocks import fill_file, settle, table
from vivace import errors
from vivace.checkpoint import config_keys, families, neutral_keys, rope_keys
from vivace.checkpoint.gguf import configuration, decoding, pieces
from vivace.checkpoint.quantized import settings
from vivace.cli import app
from vivace.core.config import ModelConfig
from vivace.core.cpu.chain import why_no_chain
from vivace.core.cpu.plan import why_no_span
from vivace.kernels import reference
from vivace.methods.dynamic.gates import GatesConfig
from vivace.methods.dynamic.objective import RouterTraining
from vivace.methods.dynamic.router import RouterConfig
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.objective import MultirateLoss
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.objective import MultistreamLoss
from vivace.methods.multistream.shared import SharedLoss
from vivace.methods.table import METHODS
from vivace.prefill.table import PREFILLS
from vivace.recipes.reading import RECIPES
from vivace.serve import bodies, foreign, metrics, server_metrics

ROOT = Path(__file__).resolve().parents[1]

PECULIARITIES = {
    "llama": "Llama 2 and 3: all rotary kinds, attention and feed-forward biases",
    "mistral": "one sliding window in every layer",
    "qwen2": "Qwen2 and Qwen2.5: query, key and value biases, windows from a layer on",
    "qwen3": "queries and keys normed per head",
    "gemma2": "scaled embeddings, norms before and after each half, soft-caps, alternating windows",
    "gemma3_text": "as Gemma 2 with normed queries and keys, and two rotary embeddings",
    "gemma3": "the text half of a multimodal Gemma 3 checkpoint; its vision half is not used",
    "phi3": "Phi-3, 3.5 and 4: fused matrices, partial rotary embedding, longrope, sliding window",
    "olmo2": "norms after each half, queries and keys normed over their full width",
    "olmoe": "mixture of experts, clipped queries, keys and values",
    "mixtral": "mixture of experts, weights of the chosen experts normalised",
    "qwen3_moe": "mixture of experts in all or some layers",
    "gpt2": "learned positions, layer norm, transposed matrices",
    "opt": "learned positions with an offset, layer norm, untied or tied head",
    "bart": "encoder-decoder; norms of sums and of embeddings, learned positions, a bias of logits",
    "mbart": "encoder-decoder; as BART with norms before each half",
    "pegasus": "encoder-decoder; norms before each half, sinusoids",
    "marian": "encoder-decoder; norms of sums, sinusoids; one vocabulary for both sides",
    "m2m_100": "encoder-decoder, also NLLB; norms before each half, sinusoids with an offset",
    "t5": "encoder-decoder, 1.0, 1.1 and Flan; a bias by distance, no factor on scores, tied or untied heads",
    "mt5": "encoder-decoder; as T5 1.1",
}
"""One line per ``model_type``; a test fails if a family is missing here."""


def methods_table() -> str:
    """Return the table of all methods."""
    rows = [
        (
            f"`{method.name}`",
            method.summary,
            f"`{method.adapter}`" if method.adapter else "none",
            "same text" if method.lossless else "lossy",
        )
        for method in METHODS.values()
    ]
    return table(("method", "what it does", "adapter", "answers"), rows)


def prefills_table() -> str:
    """Return the table of all ways to read a prompt."""
    rows = [
        (f"`{way.name}`", way.summary, f"`{way.keep}`" if way.keep else "", "lossy" if way.is_lossy else "exact")
        for way in PREFILLS.values()
    ]
    return table(("name", "what goes on", "`--keep` unless you say", "answers"), rows)


def method_lists() -> str:
    """Return what is read of each method of quantization."""
    return table(("`quant_method`", "read"), [(f"`{name}`", what) for name, what in settings.READ.items()])


def gguf_lists() -> str:
    """Return what is read of GGUF files."""
    rows = (
        ("architectures", configuration.ARCHITECTURES),
        ("number formats", decoding.TYPES),
        ("rules by which byte-level tokenizers split text", pieces.SPLITS),
    )
    return table(("what", "read"), [(what, _listed(names)) for what, names in rows])


def families_table() -> str:
    """Return the table of all values of ``model_type``, with what is particular about each."""
    return table(("`model_type`", "particular"), [(f"`{name}`", PECULIARITIES[name]) for name in families.FAMILIES])


def families_line() -> str:
    """Return one sentence that lists all values of ``model_type``."""
    return "Checkpoints with these values of `model_type` are read: " + _listed(families.FAMILIES) + "."


def rotary_table() -> str:
    """Return the table of rotary kinds and the settings that each reads."""
    rows = [(f"`{kind}`", _listed(sorted(read)) or "none") for kind, read in rope_keys._SETTINGS.items()]
    return table(("`rope_type`", "settings read"), rows)


def published_table() -> str:
    """Return the table of published configurations by family: those that open, and those that are refused and why."""
    opens: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for one in published_checkpoints.published():
        try:
            families.translate(one.config)
            opens.setdefault(one.family, []).append(f"`{one.name}`")
        except errors.UnsupportedError as error:
            reason = str(error).split(";")[0].removeprefix("config.json says ")
            refused.setdefault(one.family, []).append(f"`{one.name}`: {reason}")
    rows = [
        (f"`{family}`", ", ".join(opens.get(family, [])), "; ".join(refused.get(family, [])) or "none")
        for family in families.FAMILIES
    ]
    return table(("`model_type`", "opens", "is refused"), rows)


def native_table() -> str:
    """Return the table of what native kernels run in one call, by family, as its published configurations have it."""
    rows = []
    for family in families.FAMILIES:
        configs = list(_opening(family))
        apart = {name: why_no_span(config) for name, config in configs}
        single = {name: apart[name] or why_no_chain(config) for name, config in configs}
        if families.FAMILIES[family].has_encoder:  # no configuration was collected
            apart, single = {family: None}, {family: "the text has a source"}
        rows.append((f"`{family}`", _unless(apart), _unless(single)))
    return table(("`model_type`", "several layers", "several tokens"), rows)


def _opening(family: str) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the names and configurations of a family's published checkpoints that open."""
    for one in published_checkpoints.published():
        with suppress(errors.UnsupportedError):
            if one.family == family:
                yield one.name, families.translate(one.config)


def _unless(reasons: dict[str, str | None]) -> str:
    """Return "yes", or "no" and why, with the names of the checkpoints where it is not so for all of a family."""
    found = {reason: [name for name in reasons if reasons[name] == reason] for reason in reasons.values()}
    if found.keys() == {None}:
        return "yes"
    lines = []
    for reason, names in found.items():
        if reason is not None:
            lines.append(f"no: {reason}" if len(found) == 1 else f"not {_listed(names)}: {reason}")
    return "; ".join(lines) if len(found) == 1 else "yes, but " + "; ".join(lines)


def neutral_table() -> str:
    """Return the table of keys that are accepted at one value in one family."""
    rows = [
        (f"`{row.key}`", f"`{json.dumps(row.value)}`", _family(row.family), row.source) for row in neutral_keys.NEUTRAL
    ]
    return table(("key", "value", "in", "why it changes nothing"), rows)


def _family(name: str) -> str:
    """Return a family as it is written in a table."""
    return "every family" if name == neutral_keys.ANY_FAMILY else f"`{name}`"


def harmless_line() -> str:
    """Return the list of keys that are ignored because they do not change the numbers."""
    return _listed(sorted(config_keys.HARMLESS)) + "."


def error_tree() -> str:
    """Return the tree drawn in the docstring of ``errors.py``."""
    drawn = inspect.getdoc(errors) or ""
    lines = [line for line in drawn.splitlines() if line.startswith(("    V", "    ├", "    │", "    └"))]
    return "```text\n" + "\n".join(line[4:] for line in lines) + "\n```"


def commands_table() -> str:
    """Return the table of all commands with the first line of their help."""
    rows = [(f"`vivace {name}`", summary) for name, summary in _commands()]
    return table(("command", "what it does"), rows)


def flags_table(command: str, panels: Sequence[str]) -> str:
    """Return the table of a command's flags in these panels of its help, with their defaults."""
    found = cast(Any, typer.main.get_command(app.build())).commands[command].params
    rows = [
        (f"`{flag.opts[0]}`", "" if flag.default is None else f"`{flag.default}`", flag.help)
        for panel in panels
        for flag in found
        if getattr(flag, "rich_help_panel", None) == panel
    ]
    return table(("flag", "default", "meaning"), rows)


def recipes_table() -> str:
    """Return the table of packaged recipes; the first line of each names what it trains, before a colon."""
    first_lines = [
        (path.stem, path.read_text(encoding="utf-8").splitlines()[0]) for path in sorted(RECIPES.glob("*.yaml"))
    ]
    return table(
        ("recipe", "trains"), [(f"`{name}`", line.removeprefix("# ").split(":")[0]) for name, line in first_lines]
    )


def _commands() -> list[tuple[str, str]]:
    """Return the name and the first line of help of every command."""
    built = app.build()
    found = [(str(c.name), _first_line(c.callback)) for c in built.registered_commands]
    for group in built.registered_groups:
        assert group.typer_instance is not None
        found += [(f"{group.name} {c.name}", _first_line(c.callback)) for c in group.typer_instance.registered_commands]
    return found


def _first_line(function: Any) -> str:
    """Return the first paragraph of a function's docstring, on one line."""
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def fields_table(kind: type[Any]) -> str:
    """Return the table of a configuration's fields, inherited ones too, with their defaults and docstrings."""
    docs: dict[str, str] = {}
    for owner in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        tree = ast.parse(inspect.getsource(owner)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for pair in pairwise(tree.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.replace("``", "`").split())
    rows = [(f"`{f.name}`", f"`{f.default}`", docs.get(f.name, "")) for f in dataclasses.fields(kind)]
    return table(("field", "default", "meaning"), rows)


def request_fields(kind: type[Any], without: type[Any] | None = None) -> str:
    """Return the table of the fields of a request body, without those of another one."""
    known = set() if without is None else set(without.model_fields)
    rows = [
        (f"`{name}`", "needed" if field.is_required() else f"`{_as_json(field.default)}`", field.description or "")
        for name, field in kind.model_fields.items()
        if name not in known
    ]
    return table(("field", "default", "effect"), rows)


def _as_json(value: Any) -> str:
    """Write a default as JSON; None means that the field is left out."""
    return "left out" if value is None else json.dumps(value)


def refused_fields() -> str:
    """Return the table of fields of other servers that are refused, the values accepted anyway, and what to use
    instead.
    """
    rows = []
    for name in [*foreign.REFUSED, *(name for name in foreign.NEUTRAL if name not in foreign.REFUSED)]:
        accepted = ["any text" if one is str else f"`{json.dumps(one)}`" for one in foreign.NEUTRAL.get(name, ())]
        rows.append((f"`{name}`", ", ".join(accepted), foreign.REFUSED.get(name, "see above")))
    return table(("field", "accepted, as if left out", "instead of other values"), rows)


def metrics_table() -> str:
    """Return the table of Prometheus metrics."""
    counters = metrics.COUNTERS | metrics.WORKER_COUNTERS
    rows = [(f"`vivace_{stem}_total`", text) for stem, text in counters.items()]
    labelled = metrics.BY_LABEL | server_metrics.SERVER_COUNTERS
    rows += [(f"`vivace_{stem}_total` by {labels}", text) for stem, (labels, text) in labelled.items()]
    rows += [(f"`vivace_{stem}`", text) for stem, text in (metrics.GAUGES | server_metrics.SERVER_GAUGES).items()]
    rows += [(f"`vivace_{stem}` (histogram)", text) for stem, (text, _) in metrics.HISTOGRAMS.items()]
    rows.append((f"`vivace_{server_metrics.LAG}` (histogram)", server_metrics.LAG_MEANING))
    return table(("metric", "meaning"), rows)


def bit_rules() -> str:
    """Return the rules listed in the docstring of ``kernels/reference.py``."""
    text = inspect.getdoc(reference) or ""
    return "\n\n".join(part for part in text.split("\n\n") if part.startswith("* ")).replace("``", "`")


def _listed(names: Any) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def wanted() -> dict[Path, str]:
    """Return the text that every file with generated parts should have."""
    parts = {
        ROOT / "README.md": {"methods": methods_table(), "families": families_line()},
        ROOT / "docs" / "quickstart.md": {"commands": commands_table(), "recipes": recipes_table()},
        ROOT / "docs" / "techniques" / "quantized_checkpoints.md": {
            **{"gguf": gguf_lists(), "methods": method_lists()},
        },
        ROOT / "docs" / "models.md": {
            "families": families_table(),
            "rotary": rotary_table(),
            "harmless": harmless_line(),
            "neutral": neutral_table(),
            "native": native_table(),
            "published": published_table(),
        },
        ROOT / "docs" / "errors.md": {"tree": error_tree()},
        ROOT / "docs" / "losslessness.md": {"rules": bit_rules()},
        ROOT / "docs" / "serving.md": {
            "shared": request_fields(bodies.GenerationBody),
            "chat": request_fields(bodies.ChatBody, bodies.GenerationBody),
            "completions": request_fields(bodies.CompletionBody, bodies.GenerationBody),
            "refused": refused_fields(),
            "settings": flags_table("serve", ("Server", "Limits")),
            "metrics": metrics_table(),
        },
        ROOT / "docs" / "techniques" / "multirate.md": {
            "config": fields_table(MultirateConfig),
            "loss": fields_table(MultirateLoss),
        },
        ROOT / "docs" / "techniques" / "multistream.md": {
            "config": fields_table(MultistreamConfig),
            "loss": fields_table(MultistreamLoss),
            "shared": fields_table(SharedLoss),
            "plan": fields_table(StreamPlan),
        },
        ROOT / "docs" / "techniques" / "lazy.md": {"ways": prefills_table()},
        ROOT / "docs" / "techniques" / "dynamic_depth.md": {
            "gates": fields_table(GatesConfig),
            "router": fields_table(RouterConfig),
            "training": fields_table(RouterTraining),
        },
    }
    files = {path: fill_file(path, blocks) for path, blocks in parts.items()}
    return files | {ROOT / "docs" / "images" / "rooms.svg": rooms.draw(rooms.rooms(PACKAGE, FLOORS))}


def main(args: list[str]) -> int:
    """Write the files, or with ``--check`` name those that are out of date; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that are out of date")
    check = parser.parse_args(args).check
    stale = settle(wanted(), check=check)
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date: python -m tools.write_docs' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
