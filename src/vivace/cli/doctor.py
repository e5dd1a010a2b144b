"""``vivace doctor``: what works on this machine and for this model, and why other things do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.errors import ConfigError, VivaceError
from vivace.methods.spec import MethodSpec
from vivace.methods.table import METHODS
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.engine import Engine

EXTRAS = {"bench": ("sacrebleu", "rouge_score"), "train": ("tensorboard",), "llamacpp": ("llama_cpp",)}
"""Modules that each optional extra of the package installs."""


@dataclass(frozen=True)
class Finding:
    """The result of one examination."""

    subject: str
    """What was examined."""
    works: bool
    detail: str
    """What was found, or why it does not work."""


@options.grouped
def doctor(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Folder, Hub id or GGUF file; left out: the model that ships.")
    ] = None,
    same_model: options.Model = None,
    flags: options.LoadFlags,
    link_interface: options.LinkInterface = None,
    timeout: options.Timeout = None,
    as_json: options.AsJson = False,
) -> None:
    """Examine machine, packages, model and methods, under torchrun also the machines and links of all ranks; ends with
    status 1 if the model cannot answer.
    """
    if model is not None and same_model is not None:
        raise ConfigError(f"the model is given twice, as {model!r} and as --model {same_model!r}; give it once")
    model = same_model if model is None else model
    ranks = rank_findings(link_interface, timeout)
    if ranks is None:
        return  # a rank that is not 0 has answered what it was asked
    findings = [*machine_findings(), *ranks, look("kernels", partial(_kernels, flags.kernels))]
    engine: Engine | None = None

    def load() -> str:
        nonlocal engine
        engine = open_engine(model, (), flags)
        c = engine.model.config
        size = f"{c.num_layers} layers of width {c.width}, context {c.max_positions}, {engine.model.dtype}"
        size += f", {format_bytes(engine.num_bytes)} of {engine.weights} weights"
        return f"{size}, {engine.kernels.name} kernels ({engine.kernels.reason})"

    findings.append(look("model", load))
    if engine is not None:
        findings += model_findings(engine)
    can_answer = engine is not None and next(finding for finding in findings if finding.subject == "answer").works
    if as_json:
        console.json({"can_answer": can_answer, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            console.result(f"{'ok' if finding.works else '--'}  {finding.subject:<24}{finding.detail}")
    if not can_answer:
        raise typer.Exit(1)


def look(subject: str, attempt: Callable[[], str]) -> Finding:
    """Try something; an error becomes a finding."""
    try:
        return Finding(subject, True, attempt())
    except VivaceError as error:
        return Finding(subject, False, " ".join(str(error).split()))


def machine_findings() -> list[Finding]:
    """Examine the machine and the installed packages."""
    import torch

    from vivace.evaluate.provenance import provenance

    has_gpu = torch.cuda.is_available()
    here = provenance(torch.device("cuda" if has_gpu else "cpu"))
    versions = ", ".join(f"{name} {found}" for name, found in here.packages.items())
    findings = [
        Finding("processor", True, f"{here.cpu}, {here.num_cores} cores, {here.num_threads} threads, {here.system}"),
        Finding("accelerator", has_gpu, here.device if has_gpu else "none; the CPU does everything"),
        Finding("packages", True, f"python {here.python}, {versions}"),
    ]
    for extra, modules in EXTRAS.items():
        has_all = all(find_spec(module) is not None for module in modules)
        detail = ", ".join(modules) if has_all else f"not installed; pip install 'vivace[{extra}]'"
        findings.append(Finding(f"extra {extra}", has_all, detail))
    return findings


def rank_findings(interface: str | None, timeout_s: float | None) -> list[Finding] | None:
    """Examine the machines of all ranks and the links between them; nothing where torchrun did not start this process,
    None on the ranks that are not 0.

    Raises:
        ConfigError: an interface or a timeout is given and there are no ranks.
        WorldError: the ranks do not find one another, or one of them ended.
    """
    from vivace.parallel import world as worlds

    if not worlds.is_launched():
        if (interface, timeout_s) != (None, None):
            raise ConfigError(
                "links are between ranks, which torchrun starts: torchrun --nproc-per-node 2 -m vivace doctor"
            )
        return []
    import torch

    from vivace.evaluate.provenance import provenance
    from vivace.parallel.examining import examine

    world = worlds.join(interface=interface, timeout_s=timeout_s)
    here = provenance(torch.device("cpu"))
    facts = {"processor": here.cpu, "cores": here.num_cores, "threads": here.num_threads}
    with world.guarding():
        machines, links = examine(world, {**facts, "packages": {"python": here.python, **here.packages}})
    if not world.leads:
        return None
    world.close()
    findings = []
    for rank, machine in enumerate(machines):
        other = {name: found for name, found in machine["packages"].items() if found != here.packages.get(name)}
        other.pop("python", None)
        differs = "".join(f", {name} {found} (rank 0 has {here.packages.get(name)})" for name, found in other.items())
        found = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads{differs}"
        findings.append(Finding(f"rank {rank}", not other, found))
    for link in links:
        speed = f"{link.bytes_per_s * 8 / 1e6:,.0f} Mbit/s, {link.latency_s * 1e3:.2f} ms one way"
        findings.append(Finding(f"link {link.first} to {link.second}", True, speed))
    return findings


def _kernels(asked: str) -> str:
    """Return which kernels would be used, and why."""
    from vivace.kernels.choice import choose

    choice = choose(asked)
    return f"{choice.name}: {choice.reason}"


def model_findings(engine: Engine) -> list[Finding]:
    """Examine a loaded model: its tokenizer, a short answer, and every method."""
    has_template = engine.tokenizer.has_template
    findings = [
        Finding("chat template", has_template, "yes" if has_template else "none; prompts go in as they are"),
        Finding("keys and values", True, _blocks(engine)),
        look("answer", lambda: repr(engine.generate("Hello", max_new_tokens=4, method="plain")[0].text)),
    ]
    findings.append(look("auto", partial(_remembered, engine)))
    methods = [look(f"method {method.name}", partial(_try_method, engine, method)) for method in METHODS.values()]
    return [*findings, *methods]


def _blocks(engine: Engine) -> str:
    """Return what a block of keys and values is, and what a text takes."""
    store = engine.model.blocks
    text = format_bytes(engine.model.slot_bytes(1000))
    left = engine.memory.room_bytes
    room = "" if left is None else f"; {format_bytes(left)} of memory are left for them"
    return f"blocks of {store.size} entries, {format_bytes(store.block_bytes)} each; 1000 tokens take {text}{room}"


def _remembered(engine: Engine) -> str:
    """Return what ``auto`` has measured on this machine in earlier runs, and where that is kept."""
    from vivace.files import cache_folder
    from vivace.methods.auto.memory import KeptMeasurements, report

    place = engine.methods.place
    if place is None or not engine.methods.remembers:
        return "measures anew in every run"
    return report(KeptMeasurements(cache_folder(), place))


def _try_method(engine: Engine, method: MethodSpec) -> str:
    """Make the method's drafter, which raises if something is missing, and return the method's summary."""
    engine.methods.drafter(method.name)
    return method.summary
