"""Memory, roofline, provenance and peers: what they report is of the thing they were pointed at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.decode.tiny_decoders import build
from tests.tiny_checkpoints import make_checkpoint
from vivace.engine import load
from vivace.errors import ConfigError
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.memory import peak_memory
from vivace.evaluate.peers import peer_systems
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import measure_roofline, pass_bytes
from vivace.evaluate.sameness import Difference, compare
from vivace.evaluate.systems import MethodSystem

CPU = torch.device("cpu")
TEXTS = ("Describe: name[Oak], food[French]", "Hello hello hello", "near the river")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_peak_memory_is_that_of_the_block() -> None:
    with peak_memory(CPU) as small:
        pass
    with peak_memory(CPU) as large:
        torch.ones(1 << 24)  # 64 MiB
    with peak_memory(CPU) as again:
        pass
    assert small.num_bytes is not None
    assert large.num_bytes is not None
    assert again.num_bytes is not None
    assert large.num_bytes - small.num_bytes > 60 << 20
    assert large.num_bytes - again.num_bytes > 60 << 20


def test_roofline_counts_the_weights_a_pass_reads() -> None:
    untied, tied = build(torch.float32, tied_head=False), build(torch.float32, tied_head=True)
    everything = sum(p.nbytes for p in tied.parameters())
    assert pass_bytes(tied) == everything
    assert pass_bytes(untied) == sum(p.nbytes for p in untied.parameters()) - untied.embedding.nbytes == everything
    roof = measure_roofline(tied, context=8, repeats=1)
    assert roof.weight_bytes == everything
    assert len(roof.verify_cost) == 16
    assert roof.verify_cost[0] == 1.0
    assert roof.achieved_bytes_per_s == everything / roof.decode_s
    assert roof.read_bytes_per_s > 1e8


def test_provenance_names_versions_and_machine() -> None:
    here = provenance(CPU)
    assert here.packages["torch"] == torch.__version__
    assert here.device == "cpu"
    assert here.num_threads == torch.get_num_threads()


def test_peers_answer_as_we_do_alone_and_in_a_padded_batch(folder: Path) -> None:
    engine = load(folder, dtype="float32")
    questions = [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in TEXTS]
    peers, heat = peer_systems(
        ["transformers", "transformers-lookup"], folder, questions, max_new_tokens=12, device=CPU
    )
    assert heat is not None
    assert heat.dtype == "float32"
    ours = MethodSystem("plain", engine, 12).answer(questions)
    alone = [peer.answer([question]) for peer in peers for question in questions]
    assert tuple(trial.token_ids[0] for trial in alone) == ours.token_ids * 2
    assert all(0 < trial.decode_s < trial.total_s for trial in alone)
    together = peers[0].answer(questions)
    assert together.token_ids == ours.token_ids
    assert together.num_first_tokens == len(questions)
    end = ours.token_ids[0][4]
    peers[0].model.generation_config.eos_token_id = end
    first_end = ours.token_ids[0].index(end)
    assert peers[0].answer(questions[:1]).token_ids == (ours.token_ids[0][: first_end + 1],)


def test_unknown_peers_and_a_missing_assistant_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'transformers-lookup'"):
        peer_systems(["transformers-lokup"], folder, [], max_new_tokens=4, device=CPU)
    with pytest.raises(ConfigError, match="give --draft-model"):
        peer_systems(["transformers-assisted"], folder, [], max_new_tokens=4, device=CPU)
    assert peer_systems([], folder, [], max_new_tokens=4, device=CPU) == ([], None)


def test_differences_are_placed_and_measured(folder: Path) -> None:
    engine = load(folder, dtype="float32")
    questions = [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in TEXTS]
    _, (same,) = compare(engine, questions, ["lookup"], max_new_tokens=12, batch_size=3)
    assert same.identical
    true_generate = engine.generate

    class Wrong:
        model = engine.model
        logits = staticmethod(engine.logits)

        @staticmethod
        def generate(prompts: list[str], *, method: str, **options: object) -> list[object]:
            results = true_generate(prompts, method="plain", **options)
            if method == "wrong":
                ids = list(results[1].token_ids)
                ids[3] = (ids[3] + 1) % 300
                results[1] = type(results[1])(**{**vars(results[1]), "token_ids": tuple(ids)})
                results[2] = type(results[2])(**{**vars(results[2]), "token_ids": results[2].token_ids[:2]})
            return list(results)

    plain, (wrong,) = compare(Wrong(), questions, ["wrong"], max_new_tokens=12)  # type: ignore[arg-type]
    first, second = wrong.differences
    assert (first.prompt, first.position) == (1, 3)
    assert first.plain is not None
    assert first.found == (first.plain + 1) % 300
    true = true_generate([TEXTS[1]], method="plain", max_new_tokens=12, do_sample=False)[0].token_ids
    logits = engine.logits([[*questions[1].token_ids, *true[:3]]])[0, -1]
    assert first.gap == pytest.approx(float(logits[first.plain] - logits[first.found]))
    expected = true_generate([TEXTS[2]], method="plain", max_new_tokens=12, do_sample=False)[0].token_ids[2]
    assert second == Difference(prompt=2, position=2, plain=expected, found=None, gap=None)
    assert not wrong.identical
    assert plain[2] == tuple(true_generate([TEXTS[2]], method="plain", max_new_tokens=12, do_sample=False)[0].token_ids)
