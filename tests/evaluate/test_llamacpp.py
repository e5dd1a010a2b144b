"""llama.cpp runs the same model as we do: same logits, same answers, alone and in a ragged batch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoint.gguf.families import make, write_file
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.gguf.written import write_checkpoint
from vivace.engine import SHIPPED, load
from vivace.errors import CapacityError, DependencyError, UnsupportedError, VivaceError
from vivace.evaluate import llamacpp
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.llamacpp import LlamaCpp, LlamaCppPeer, LlamaRows, enter_llama_cpp, llama_cpp_passes
from vivace.evaluate.peers import peer_systems
from vivace.evaluate.systems import MethodSystem

TEXTS = ("Describe: name[Oak], food[French]", "Hello hello hello", "near the river")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def installed() -> None:
    pytest.importorskip("llama_cpp")


def logits_of(engine: LlamaCpp, ids: list[int]) -> np.ndarray:
    count = len(ids)
    return np.stack(engine.run(LlamaRows(ids, range(count), [0] * count, range(count))))


@pytest.mark.usefixtures("installed")
def test_logits_of_the_shipped_model_are_ours(tmp_path: Path) -> None:
    """In float32 on both sides: what remains is the order of sums."""
    engine = load(dtype="float32", kernels="torch")
    ids = engine.tokenizer.encode_prompt("Describe: name[Green Man], food[Indian], area[riverside]")
    write_checkpoint(SHIPPED, tmp_path / "m.gguf", "f32")
    theirs = LlamaCpp(tmp_path / "m.gguf", num_threads=1, capacity=len(ids), full_precision=True)
    found = logits_of(theirs, ids)
    ours = engine.logits([ids])[0].numpy()
    assert np.abs(found - ours).max() < 2e-4
    theirs.forget(0, 5)
    for place in range(5, len(ids)):
        (row,) = theirs.run(LlamaRows([ids[place]], [place], [0], [0]))
        assert np.abs(row - ours[place]).max() < 2e-4


@pytest.mark.usefixtures("installed")
def test_a_gguf_file_is_run_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of an architecture that is not written here."""
    monkeypatch.setenv("VIVACE_CACHE_DIR", str(tmp_path / "cache"))
    path = write_file("gemma3", make("gemma3"), tmp_path / "m.gguf", "q8_0")
    ours = load(path)
    questions = [BenchmarkPrompt("a", tuple(ids)) for ids in ([5, 17, 40, 3], [88, 21, 60, 9, 7])]
    (peer,) = enter_llama_cpp(["llama.cpp"], ours.folder, questions, max_new_tokens=6, batch_size=1)
    assert peer.engine.num_bytes <= path.stat().st_size
    for question in questions:
        theirs = peer.engine
        rows = logits_of(theirs, list(question.token_ids))
        theirs.forget(0, 0)
        expected = ours.logits([list(question.token_ids)])[0].numpy()
        assert np.abs(rows - expected).max() < 0.1 * np.abs(expected).max()  # inputs in eight bits on both sides
    with pytest.raises(UnsupportedError, match="only llama checkpoints can be written"):
        enter_llama_cpp(["llama.cpp-q4_0"], ours.folder, questions, max_new_tokens=6, batch_size=1)


@pytest.mark.usefixtures("installed")
def test_a_crash_is_a_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """One that fails otherwise is left to who opens the file next, and says it in its own words."""
    monkeypatch.setattr(llamacpp, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(DependencyError, match=r"peer llama.cpp crashes on this machine \(SIGSEGV\); leave it out"):
        enter_llama_cpp(["llama.cpp"], folder, [BenchmarkPrompt("a", (1, 2))], max_new_tokens=2, batch_size=1)
    monkeypatch.setattr(llamacpp, "_PROBE", "raise SystemExit(1)")
    llamacpp._probe("llama.cpp", folder)


@pytest.mark.usefixtures("installed")
def test_what_is_tried_in_another_process_runs(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(folder, tmp_path / "m.gguf")
    command = [sys.executable, "-c", llamacpp._PROBE, str(tmp_path / "m.gguf"), "1"]
    assert subprocess.run(command, capture_output=True, check=False, text=True).stderr == ""


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {
            **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        },
    ],
)
def test_logits_of_peculiar_llamas_are_ours(tmp_path: Path, rope: dict[str, object]) -> None:
    """Biases, an untied head, a head width that is not E / H, stretched positions."""
    from vivace.checkpoint.load import load_decoder
    from vivace.core.step import Step

    torch.manual_seed(3)
    config = LlamaConfig(
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
        **{"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    write_checkpoint(tmp_path, tmp_path / "m.gguf", tokenizer=False)
    theirs = LlamaCpp(tmp_path / "m.gguf", num_threads=1, capacity=64, full_precision=True)
    ids = [(7 * i) % 96 for i in range(60)]
    decoder, step = load_decoder(tmp_path), Step.dense(1, 60)
    ours = decoder.head(decoder.run(decoder.embed(torch.tensor(ids), step), step))
    assert np.abs(logits_of(theirs, ids) - ours.numpy()).max() < 2e-4


@pytest.mark.usefixtures("installed")
def test_it_answers_as_we_do_alone_and_in_a_batch(folder: Path) -> None:
    engine = load(folder, dtype="float32")
    questions = [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in TEXTS]
    ours = MethodSystem("plain", engine, 12).answer(questions)
    peers, heat = peer_systems(
        ["llama.cpp", "transformers", "llama.cpp-q8_0"],
        folder, questions, max_new_tokens=12, device=torch.device("cpu"), batch_size=3,
    )  # fmt: skip
    assert [peer.name for peer in peers] == ["llama.cpp", "transformers", "llama.cpp-q8_0"]
    assert heat is not None
    alone = [peers[0].answer([question]) for question in questions]
    assert tuple(trial.token_ids[0] for trial in alone) == ours.token_ids
    assert all(0 < trial.decode_s < trial.total_s for trial in alone)
    together = peers[0].answer(questions)
    assert together.token_ids == ours.token_ids
    assert together.num_first_tokens == 3
    assert all(len(ids) == 12 for ids in peers[2].answer(questions).token_ids)


@pytest.mark.usefixtures("installed")
def test_its_lookup_writes_what_it_writes_alone(folder: Path) -> None:
    """Texts that repeat themselves, some of them ended inside a draft."""
    engine = load(folder, dtype="float32")
    questions = [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text * 3))) for text in TEXTS]
    names = ["llama.cpp", "llama.cpp-lookup"]
    plain, lookup = enter_llama_cpp(names, folder, questions, max_new_tokens=40, batch_size=3)
    wanted = plain.answer(questions)
    found = lookup.answer(questions)
    assert found.token_ids == wanted.token_ids
    assert 0 < found.num_accepted < found.num_drafted
    assert found.num_steps == 3 * 40 - found.num_accepted - found.num_first_tokens
    for end in {ids[place] for ids in wanted.token_ids for place in (3, 9, 20)}:
        ends = frozenset({end})
        cut = replace(lookup, end_tokens=ends).answer(questions).token_ids
        assert cut == replace(plain, end_tokens=ends).answer(questions).token_ids


@pytest.mark.usefixtures("installed")
def test_its_quantizer_makes_k_quants() -> None:
    engine = load()
    [question] = [BenchmarkPrompt(TEXTS[0], tuple(engine.tokenizer.encode_prompt(TEXTS[0])))]
    names = ["llama.cpp", "llama.cpp-q4_k_m"]
    whole, small = enter_llama_cpp(names, SHIPPED, [question], max_new_tokens=8, batch_size=1)
    assert small.engine.num_bytes < 0.6 * whole.engine.num_bytes
    assert len(small.answer([question]).token_ids[0]) == 8


@pytest.mark.usefixtures("installed")
def test_end_tokens_end_an_answer_and_stay(folder: Path) -> None:
    engine = load(folder, dtype="float32")
    questions = [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in TEXTS]
    (peer,) = enter_llama_cpp(["llama.cpp"], folder, questions, max_new_tokens=12, batch_size=3)
    whole = peer.answer(questions).token_ids
    assert peer.end_tokens == {0}
    end = whole[1][4]
    cut = LlamaCppPeer(peer.name, peer.engine, 12, frozenset({end})).answer(questions).token_ids
    assert cut == tuple(ids[: ids.index(end) + 1] if end in ids else ids for ids in whole)


@pytest.mark.usefixtures("installed")
def test_more_rows_than_room_are_refused(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(folder, tmp_path / "m.gguf")
    engine = LlamaCpp(tmp_path / "m.gguf", num_threads=1, capacity=256)
    logits_of(engine, [5] * 256)
    with pytest.raises(CapacityError, match="no room for 1 rows"):
        engine.run(LlamaRows([5], [256], [0], [0]))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(VivaceError, match="does not open"):
        LlamaCpp(tmp_path / "broken.gguf", num_threads=1, capacity=8)


@pytest.mark.usefixtures("installed")
def test_passes_over_rows_can_be_repeated(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(folder, tmp_path / "m.gguf")
    engine = LlamaCpp(tmp_path / "m.gguf", num_threads=1, capacity=32, full_precision=True)
    one, sixteen = llama_cpp_passes(engine, (1, 16), context=20)
    for run in (sixteen, one, sixteen, one):
        run()
    (row,) = engine.run(LlamaRows([1], [21], [0], [0]))
    ids = [1] * 22
    assert np.abs(row - load(folder, dtype="float32").logits([ids])[0, -1].numpy()).max() < 2e-4


def test_without_the_package_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    llamacpp._library.cache_clear()
    with pytest.raises(DependencyError, match=r"pip install 'vivace\[llamacpp\]'"):
        peer_systems(["transformers", "llama.cpp"], folder, [], max_new_tokens=4, device=torch.device("cpu"))


@pytest.mark.usefixtures("installed")
def test_other_families_are_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="this one is gpt2"):
        enter_llama_cpp(["llama.cpp"], tmp_path, [], max_new_tokens=4, batch_size=1)
