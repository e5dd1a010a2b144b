"""The documents are true: their commands and programs run, their tables are the code's, their links lead somewhere.

A fenced ``bash`` or ``python`` block runs on a tiny checkpoint, unless the line above it is
``<!-- no-run: reason -->``. Blocks of a page run in order, in one folder; Python blocks share their names.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import captions, plots, report
from tests.parity.encoder_decoders import ENCODER_DECODERS
from tests.parity.families import CONFIGS, make
from tests.tiny_checkpoints import make_checkpoint
from tools import blocks, write_docs
from vivace import engine
from vivace.checkpoint.families import FAMILIES, translate
from vivace.cli.app import run
from vivace.cli.console import console
from vivace.errors import UnsupportedError
from vivace.methods.table import METHODS

ROOT = Path(__file__).resolve().parents[1]
FRONT = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PAGES = [*(ROOT / name for name in FRONT), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- no-run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LOOP = "{steps: 3, warmup_steps: 1}"
SMALL = {
    "multirate": (f"loop={LOOP}", "held_back=4", "tokens_per_batch=256", "adapter.exit_layer=1"),
    "dynamic": (
        f"loop={LOOP}",
        "held_back=4",
        "router_rows=4",
        "tokens_per_batch=256",
        "adapter.gates.gates=[{layer: 1}]",
    ),
    "finetune": (f"stages=[{{loop: {LOOP}}}]", "held_back=4", "tokens_per_batch=256"),
}
"""Changes that make a page's training quick enough for a test, and fit its model of two layers."""


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    reason: str | None


def blocks_of(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(match["language"], match["body"], match["reason"]) for match in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages take it for granted: two models, public data and an accelerator."""
    folder = tmp_path_factory.mktemp("docs")
    make_checkpoint(folder / "my-model", context=1024)
    make_checkpoint(folder / "my-small-model", seed=1, context=1024)
    (folder / "public").mkdir()
    rows = [{"mr": f"name[Cotto], food[{food}]", "ref": f"Cotto has {food} food."} for food in "abcdefghijkl"]
    for split in ("train", "dev"):
        (folder / "public" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in ("data e2e public prompts", TRAIN):
            assert run(tuned(shlex.split(line))) == 0
    return folder


TRAIN = "train multirate --model my-model --data prompts/e2e-train.jsonl --out my-model/adapters/multirate"


WRITES = ("generate", "check", "bench", "tune")
"""Commands that write answers as long as they are told."""


def tuned(words: list[str]) -> list[str]:
    """A command as the page has it, made small where it trains, and short where the page does not say how long."""
    if words[0] == "train":
        return [*words, *SMALL[words[1]]]
    is_open = words[0] in WRITES and "--max-new-tokens" not in words
    return [*words, "--max-new-tokens", "12"] if is_open else words


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(place)
    monkeypatch.setattr(engine, "SHIPPED", place / "my-model")
    yield place
    console.is_quiet = False


def run_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of a bash block: ``vivace ...``, with ``echo TEXT |`` before it or not."""
    before, pipe, command = line.rpartition(" | ")
    if pipe:
        said = shlex.split(before)
        assert said[0] == "echo", f"a page may pipe echo only: {line}"
        monkeypatch.setattr("sys.stdin", io.StringIO(" ".join(said[1:]) + "\n"))
    words = shlex.split(command)
    assert words[0] == "vivace", f"mark the block no-run and say why: {line}"
    status = run(tuned(words[1:]))
    assert status == 0, f"status {status}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_runs(page: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        if block.reason is not None:
            continue
        if block.language == "bash":
            for line in filter(None, map(str.strip, block.body.splitlines())):
                run_line(line, monkeypatch)
        elif block.language == "python":
            exec(compile(block.body, page.name, "exec"), names)


def test_blocks_are_found() -> None:
    languages = {block.language for page in PAGES for block in blocks_of(page)}
    assert languages <= {"bash", "python", "text"}, f"write bash, python or text: {languages}"
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert fences == 2 * sum(len(blocks_of(page)) for page in PAGES), "a fence without a language, or left open"
    ran = [block for page in PAGES for block in blocks_of(page) if block.reason is None and block.language != "text"]
    assert len(ran) >= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not target.startswith("#")
    }
    alone = [page for page in PAGES if page not in linked and page.name != "README.md"]
    assert not alone, f"no page leads to {[str(page.relative_to(ROOT)) for page in alone]}: README.md lists them"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|tools|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_parts_written_from_the_code_are_current() -> None:
    stale = blocks.settle(write_docs.wanted(), check=True)
    assert not stale, f"run python -m tools.write_docs: {[path.name for path in stale]}"


def test_parts_written_from_results_are_current() -> None:
    results = report.read_results(report.DECODE)
    stale = blocks.settle(report.wanted(results), check=True)
    assert not stale, f"run python -m benchmarks.report: {[path.name for path in stale]}"
    pictures = [name for name in (plots.ACCEPTANCE, plots.TIME) if (report.IMAGES / name).is_file()]
    assert len(pictures) == (2 if results else 0), "run python -m benchmarks.report"


def test_every_part_is_written_by_the_script_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    written: set[tuple[str, Path, str]] = set()
    wanted = {
        "benchmarks.report": (report, lambda: report.wanted(report.read_results(report.DECODE))),
        "tools.write_docs": (write_docs, write_docs.wanted),
    }
    for script, (module, write) in wanted.items():

        def note(path: Path, parts: dict[str, str], script: str = script) -> str:
            written.update((script, path, name) for name in parts)
            return ""

        monkeypatch.setattr(module, "fill_file", note)
        write()
    marked = {
        (script, page, name)
        for page in (*report.ROOT.glob("*.md"), *report.ROOT.glob("docs/**/*.md"), *report.ROOT.glob("src/**/*.md"))
        for name, script in re.findall(r"<!-- begin ([^:]+): python -m (\S+) -->", page.read_text(encoding="utf-8"))
    }
    assert marked == written


def test_every_family_is_described() -> None:
    assert set(write_docs.PECULIARITIES) == set(FAMILIES)
    both = {name.removesuffix("_1.1") for name in ENCODER_DECODERS}
    assert set(FAMILIES) == {*CONFIGS, *both, "gemma3"}, (
        "docs/models.md says that only gemma3 has no parity test of its own"
    )


REFUSED = [
    ("An unknown `model_type`", "llama", {"model_type": "nova"}),
    ("A key of `config.json` that nobody read", "llama", {"nova_gate": 2}),
    ("A rotary kind or a setting of it", "llama", {"rope_parameters": {"rope_type": "nova", "rope_theta": 1e4}}),
    ("Phi-3 models with another rotary", "phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("A `quantization_config` of another method", "llama", {"quantization_config": {"quant_method": "aqlm"}}),
    ("norm after each half", "opt", {"do_layer_norm_before": False}),
    ("projected\n  embeddings", "opt", {"word_embed_proj_dim": 8}),
    ("scaled by the layer's number", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("cross-attention", "gpt2", {"add_cross_attention": True}),
    ("in both directions", "gemma2", {"use_bidirectional_attention": True}),
    ("multimodal positions", "qwen2", {"use_mrope": True}),
]


@pytest.mark.parametrize(
    ("claim", "family", "change"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_said_to_be_refused_is(claim: str, family: str, change: dict[str, Any]) -> None:
    assert claim in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    written = make(family).config.to_dict()
    translate(written)
    with pytest.raises(UnsupportedError):
        translate(written | change)


def test_lossy_methods_are_named_as_such() -> None:
    text = (ROOT / "docs" / "losslessness.md").read_text(encoding="utf-8")
    unsaid = [m.name for m in METHODS.values() if not m.lossless and f"`{m.name}`" not in text]
    assert not unsaid, f"docs/losslessness.md does not say that these are lossy: {unsaid}"


def test_an_unknown_or_doubled_part_is_an_error() -> None:
    page = "<!-- begin a: x -->\nold\n<!-- end a -->\n"
    assert blocks.fill(page, "a", "new | text") == "<!-- begin a: x -->\nnew | text\n<!-- end a -->\n"
    for text, name in ((page, "b"), (page + page, "a")):
        with pytest.raises(ValueError, match="expected one part"):
            blocks.fill(text, name, "new")


def bench_run(method: str, rate: float, *, accepted: tuple[float, ...] = (), same: bool = True) -> dict[str, Any]:
    speed = rate / 100
    return {
        **{"method": method, "tokens_per_s": rate, "tokens_per_s_spread": [rate - 1, rate + 1], "speedup": speed},
        **{
            "speedup_interval": [speed - 0.1, speed + 0.1],
            "end_to_end_tokens_per_s": rate / 2,
            "identical": same,
            "first_token_ms": 12.34,
        },
        **{"num_different": int(not same), "num_tokens": 200, "acceptance_per_position": list(accepted)},
        **{"mean_acceptance_length": 1 + sum(accepted), "tokens_per_target_pass": 2.5 if accepted else None},
        **{"prefill_s": 0.1, "draft_s": 0.2, "verify_s": 0.7, "peak_memory_bytes": 3 << 20},
    }


def write_result(path: Path, **changes: Any) -> None:
    rates = {"read_bytes_per_s": 4e10, "achieved_bytes_per_s": 2e10}
    costs = [1.0 + k / 10 for k in range(16)]
    machine = {"cpu": "A CPU", "num_cores": 2, "num_threads": 2, "device": "cpu"}
    values = {
        "provenance": {"commit": None, "python": "3.11", "packages": {"torch": "2.13"}, **machine},
        "roofline": {**rates, "weight_bytes": 29e6, "decode_s": 0.001, "verify_cost": costs},
        "setting": {
            **{"model": "some-model", "prompts": "e2e", "num_prompts": 7, "max_new_tokens": 64, "batch_size": 1},
            **{"repeats": 3, "dtype": "bfloat16", "kernels": "torch"},
        },
        "quality": {"e2e": {"bleu": 61.25}},
        "peers": {"dtype": "float32", "rates": {"float32": 2.0, "bfloat16": 1.0}},
        "runs": [bench_run("plain", 100), bench_run("multirate+lookup", 150, accepted=(0.9, 0.5), same=False)],
    }
    path.write_text(json.dumps(values | changes))


def test_report_of_a_result(tmp_path: Path) -> None:
    clean = machine_of(tmp_path, commit="abc")
    held = {"plain": {"weights": 28 << 20, "cache": 1 << 20, "drafter": 0}}
    write_result(tmp_path / "b.json", provenance=clean, memory={"libraries": 200 << 20, "held": held})
    write_result(tmp_path / "a.json", provenance=clean, quality=None, peers=None)
    results = report.read_results(tmp_path)
    assert [result.name for result in results] == ["a", "b"]
    summary, details = report.summary(results), report.details(results)
    measured = report.technique(results, "multirate")
    assert "| method | training | some-model, e2e | some-model, e2e |" in summary
    assert "| `plain` | none | 100, 50 tok/s | 100, 50 tok/s |" in summary
    assert "| `multirate+lookup` | not recorded | 1.50x*, 1.50x, 2.5 | 1.50x*, 1.50x, 2.5 |" in summary
    assert "**A CPU, kernels torch**, 2 threads, batch 1" in summary
    assert "wide twin" not in summary
    assert details.count("| 1.50x (1.40 to 1.60) | 12.3 ms | 75.0, 1.50x |") == 2
    assert details.count("| no (1 differ) |") == measured.count("| no (1 differ) |") == 2
    assert (
        details.count("7 prompts, at most 64 new tokens, batch 1, 3 repeats, bfloat16, kernels torch, commit abc") == 2
    )
    assert details.count("reads 20.0 GB/s of weights (29.0 MB a pass); the machine reads 40.0 GB/s") == 2
    assert "1: 1.00, 2: 1.10, 4: 1.30, 8: 1.70, 16: 2.50" in details
    assert details.count("quality of the plain answers, e2e: bleu 61.25") == 1
    assert details.count("transformers runs in float32, its fastest dtype here") == 1
    assert details.count("3 MiB at its peak, all methods and engines together; 200 MiB were libraries") == 1
    assert details.count("what each of them held was not counted yet") == 1
    assert details.count("| 28.0 MiB | 1.0 MiB | 0 | yes |") == 1
    assert measured.count("| 0.90 0.50 |") == 2
    assert "`plain`" not in measured
    assert report.technique(results, "medusa") == report.summary([]) == report.NONE_YET


def machine_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Where a result comes from, with changes."""
    write_result(folder / "some.json")
    found: dict[str, Any] = json.loads((folder / "some.json").read_text())["provenance"]
    (folder / "some.json").unlink()
    return found | changes


def test_only_clean_commits_of_one_processor_go_into_the_readme(tmp_path: Path) -> None:
    clean = machine_of(tmp_path, commit="abc")
    for changes, complaint in (
        ({"commit": "abc+changes"}, "uncommitted changes do not go into the README: b"),
        ({"commit": None}, "uncommitted changes do not go into the README: b"),
        ({"cpu": "Another CPU"}, "several processors: A CPU, Another CPU"),
    ):
        write_result(tmp_path / "a.json", provenance=clean)
        write_result(tmp_path / "b.json", provenance=clean | changes)
        with pytest.raises(ValueError, match=complaint):
            report.summary(report.read_results(tmp_path))


def test_a_table_over_other_threads_or_limits_is_refused(tmp_path: Path) -> None:
    clean = machine_of(tmp_path, commit="abc")
    write_result(tmp_path / "a.json", provenance=clean)
    write_result(tmp_path / "b.json", provenance=clean | {"num_threads": 4})
    with pytest.raises(ValueError, match="one table over num_threads 2, 4: a, b"):
        report.summary(report.read_results(tmp_path))
    write_result(tmp_path / "b.json", provenance=clean)
    longer: dict[str, Any] = json.loads((tmp_path / "b.json").read_text())["setting"] | {"max_new_tokens": 128}
    write_result(tmp_path / "b.json", provenance=clean, setting=longer)
    with pytest.raises(ValueError, match="one table over max_new_tokens 64, 128: a, b"):
        report.summary(report.read_results(tmp_path))


def test_a_row_that_does_not_fit_its_headings_is_an_error() -> None:
    assert blocks.table(("a", "b"), [("1", "2|3")]).splitlines()[2] == "| 1 | 2\\|3 |"
    with pytest.raises(ValueError, match="a row of 1 cells under 2 headings: 1"):
        blocks.table(("a", "b"), [("1",)])


def test_the_readmes_results_are_of_clean_commits_and_of_both_kernels() -> None:
    results = report.read_results(report.DECODE)
    measured = {(r.is_twin, r.setting["prompts"], r.setting["kernels"]) for r in results}
    every = {
        (twin, prompts, kernels) for twin in (0, 1) for prompts in ("e2e", "sql") for kernels in ("avx2", "avx512")
    }
    assert every == measured
    assert all(captions.is_clean(result.provenance) for result in results)
    assert {result.setting["kernels"] for result in results} == {"avx2", "avx512"}
    assert len({result.provenance["cpu"] for result in results}) == 1
    assert all(result.setting["repeats"] >= 3 for result in results)
    assert all(result.memory is not None for result in results)
    twins = [result for result in results if result.is_twin]
    drafts = [result.memory["held"]["draft"]["drafter"] for result in twins if result.memory is not None]
    assert drafts
    assert max(drafts) < 4e6, "the twin's draft model is the one that ships, not a widened one"


def test_kernels_are_tables_of_their_own(tmp_path: Path) -> None:
    able = machine_of(tmp_path, commit="abc", best_kernels="avx512")
    for name, kernels in (("a", "avx2"), ("b", "avx512")):
        write_result(tmp_path / f"{name}.json", provenance=able)
        write_result(
            tmp_path / f"{name}.json",
            provenance=able,
            setting=setting_of(tmp_path / f"{name}.json") | {"kernels": kernels},
        )
    results = report.read_results(tmp_path)
    best, others = "**A CPU, kernels avx512**", "**A CPU, kernels avx2 (this processor runs avx512 as well)**"
    front, details = report.summary(results), report.details(results)
    assert best in front
    assert others not in front
    assert front.count("\n| --- |") == 1
    assert others in details.partition("## ")[0]
    assert best not in details.partition("## ")[0]
    technique = report.technique(results, "multirate")
    assert best in technique
    assert others in technique
    assert technique.count("`multirate+lookup`") == technique.count("\n| --- |") == 2


def test_a_step_of_streams_is_said_to_run_more_layers(tmp_path: Path) -> None:
    run = bench_run("multistream", 150, accepted=(0.9,)) | {"layers_per_step": {"verify": 24, "draft": 12}}
    write_result(
        tmp_path / "a.json", runs=[bench_run("plain", 100), run], provenance=machine_of(tmp_path, commit="abc")
    )
    results = report.read_results(tmp_path)
    for text in (report.summary(results), report.details(results)):
        assert (
            "`attach: kept`: besides the 24 layers of a target pass, 12 more run for its streams, 36 in a step" in text
        )
    assert "| 24 + 12 |" in report.details(results)


def test_the_lead_is_decoding_and_whole_answers_of_every_model(tmp_path: Path) -> None:
    """Drafting with native kernels leads; a run whose text differs does not."""
    able = machine_of(tmp_path, commit="abc")
    native = {"num_prompts": 7, "prompts": "e2e.jsonl", "kernels": "avx512", "model": "some-x4"}
    runs = [bench_run("plain", 100), bench_run("multirate", 150, accepted=(0.9, 0.5)) | {"end_to_end_tokens_per_s": 60}]
    write_result(tmp_path / "a.json", runs=runs, provenance=able)
    write_result(tmp_path / "a.json", runs=runs, provenance=able, setting=setting_of(tmp_path / "a.json") | native)
    summary = report.summary(report.read_results(tmp_path))
    assert summary.startswith(
        "Speed of `multirate` relative to plain decoding, with the same text, on A CPU with avx512 kernels: on the "
        "wide twin"
    )
    assert "some-x4 (29 MB of weights per pass) **1.50x while decoding and 1.20x for whole answers on e2e**." in summary
    runs[1] = bench_run("multirate", 150, accepted=(0.9, 0.5), same=False)
    write_result(tmp_path / "a.json", runs=runs, provenance=able, setting=setting_of(tmp_path / "a.json"))
    assert "wide twin" not in report.summary(report.read_results(tmp_path))


def setting_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["setting"]
    return found


def test_pictures_of_a_result_are_the_same_each_time(tmp_path: Path) -> None:
    panels = [("some-model, e2e", [bench_run("plain", 100), bench_run("multirate", 150, accepted=(0.9, 0.5))])] * 3
    first = [path.read_bytes() for path in plots.draw(panels, tmp_path / "a")]
    assert [path.read_bytes() for path in plots.draw(panels, tmp_path / "b")] == first
    acceptance, time = (picture.decode() for picture in first)
    assert acceptance.count("some-model, e2e") == 3
    assert "multirate" in acceptance
    assert "plain" not in acceptance, "plain decoding drafts nothing"
    assert all(word in time for word in ("prefill", "draft", "verify", "plain"))


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    for text, complaint in (("{", "is not JSON"), ("{}", "no provenance, roofline, runs, setting")):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(ValueError, match=rf"odd\.json.*{complaint}"):
            report.read_results(tmp_path)
    write_result(tmp_path / "odd.json", runs=[])
    with pytest.raises(ValueError, match="no runs"):
        report.read_results(tmp_path)
