"""Plain decoding beside the checkpoint: right answers pass, rounding is told, crippled decoding is an error."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.cli.conftest import Outcome, cli
from tests.parity.families import make
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.core.sampling import Sampling
from vivace.decode.multi_step import MultiStepPlain
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.evaluate import reference
from vivace.evaluate.reference import Departure, Plainness, Text, beside_checkpoint, beside_itself
from vivace.prompts import TASKS, packaged_prompts

__all__ = ["cli"]
PROMPTS = ("Describe: name[Oak], food[French]", "Hello hello hello", "near the river", "x")
GREEDY = Sampling()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), layers=4)


def answers(engine: vivace.Engine, asked: Sequence[Any] = PROMPTS, **options: Any) -> list[Text]:
    """What plain decoding writes."""
    settings = {"method": "plain", "do_sample": False, "max_new_tokens": 24, "logprobs": False, "ignore_eos": True}
    found = engine.generate(list(asked), **{**settings, **options})
    pairs = zip(asked, found, strict=True)
    return [Text(tuple(engine.tokenizer.encode_prompt(prompt)), tuple(each.token_ids)) for prompt, each in pairs]


def test_right_answers_have_no_departures(folder: Path) -> None:
    engine = vivace.load(folder)
    found = beside_checkpoint(folder, engine.model, answers(engine), GREEDY)
    assert (found.num_prompts, found.num_tokens) == (4, 96)
    assert found.departures == ()
    assert found.num_different == 0


def test_a_wrong_token_is_told_with_its_gaps(folder: Path) -> None:
    """The token after it follows the wrong text, so it is judged on that."""
    engine = vivace.load(folder)
    texts = answers(engine)
    text = texts[1]
    wrong = (*text.answer[:5], (text.answer[5] + 1) % 300, *text.answer[6:])
    found = beside_checkpoint(folder, engine.model, [texts[0], replace(text, answer=wrong)], GREEDY)
    first = found.departures[0]
    logits = engine.logits([[*text.prompt, *text.answer[:5]]])[0, -1]
    best = logits.topk(2).values
    assert (first.prompt, first.position, first.expected, first.written) == (1, 5, text.answer[5], wrong[5])
    assert first.gap == pytest.approx(float(best[0] - logits[wrong[5]]), rel=1e-4)
    assert first.top_two_gap == pytest.approx(float(best[0] - best[1]), rel=1e-4)
    assert first.rounding == 64 * 2.0**-23 * 2.0 ** math.floor(math.log2(float(best[0])))
    assert first.is_error
    assert first in found.errors
    assert found.num_different == 1


def test_an_error_is_a_gap_above_what_rounding_explains() -> None:
    assert Departure(0, 0, 1, 2, 0.126, 0.126, 0.125).is_error
    assert not Departure(0, 0, 1, 2, 0.125, 0.125, 0.125).is_error
    assert not Departure(0, 0, 1, 2, 9.0, 9.0, None).is_error


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_model_that_ships_departs_by_rounding_alone(kernels: str) -> None:
    engine = vivace.load(kernels=kernels)
    found = beside_checkpoint(engine.folder, engine.model, answers(engine, max_new_tokens=16), GREEDY)
    assert found.errors == ()
    assert found.distance == pytest.approx(found.usual_distance, rel=0.15)
    assert not found.is_far


def _sharper(model: Any) -> None:
    for layer in model.layers:
        layer.attention.scale *= 1.1


def _turned(model: Any) -> None:
    for rotary in {id(layer.rotary): layer.rotary for layer in model.layers}.values():
        rotary._frequencies *= 1.05


@pytest.mark.parametrize("harm", [_sharper, _turned])
def test_crippled_decoding_is_an_error(harm: Callable[[Any], None]) -> None:
    """Attention that is a tenth sharper, and angles that are a twentieth too wide."""
    engine = vivace.load(kernels="torch")
    harm(engine.model)
    asked = [prompt.request for task in TASKS for prompt in packaged_prompts(task)[:2]]
    texts = answers(engine, asked, max_new_tokens=24, ignore_eos=False)
    assert beside_checkpoint(engine.folder, engine.model, texts, GREEDY).is_far


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_penalties_are_part_of_what_is_right(folder: Path, penalty: dict[str, Any]) -> None:
    engine = vivace.load(folder)
    texts = answers(engine, **penalty)
    assert beside_checkpoint(folder, engine.model, texts, Sampling(**penalty)).departures == ()
    assert beside_checkpoint(folder, engine.model, texts, GREEDY).departures


@pytest.mark.parametrize("weights", ["int8", "q4"])
def test_few_bits_are_compared_with_themselves_and_have_no_bound(folder: Path, weights: str) -> None:
    engine = vivace.load(folder, weights=weights)
    texts = answers(engine)
    found = beside_itself(engine.model, texts, GREEDY, has_few_bits=True)
    assert len(found.departures) < found.num_tokens / 10, "most are the same all the same"
    assert found.errors == ()
    assert all(one.rounding is None for one in found.departures)


def test_a_store_is_compared_with_itself(folder: Path) -> None:
    model = vivace.load(folder).model
    texts = answers(vivace.load(folder))
    assert beside_itself(model, texts, GREEDY).departures == ()
    broken = replace(texts[0], answer=(*texts[0].answer[:3], 7, *texts[0].answer[4:]))
    assert beside_itself(model, [broken], GREEDY).errors


def test_weights_of_a_store_in_bfloat16_are_bound_by_rounding_that_is_added() -> None:
    engine = vivace.load()
    text = answers(engine, max_new_tokens=16)[0]
    assert beside_itself(engine.model, [text], GREEDY).errors == ()
    unlikely = int(engine.logits([text.prompt])[0, -1].argmin())
    broken = replace(text, answer=(unlikely, *text.answer[1:]))
    first = beside_itself(engine.model, [broken], GREEDY).departures[0]
    assert first.is_error
    assert first.rounding == pytest.approx(6 * first.gap / first.deviations)


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "gpt2", "llama"])
def test_other_families(tmp_path: Path, family: str) -> None:
    """Windows, caps, learned positions; the text runs past the length for which a rotary embedding is stretched."""
    source = make(family)
    if family == "llama":
        source.config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        source.config.max_position_embeddings = 16
    source.save_pretrained(tmp_path)
    model = load_decoder(tmp_path)
    prompt = tuple(range(3, 24))
    session = Session(model, num_slots=1, capacity=64, chunk=8)
    session.admit(Request(prompt, 24, MultiStepPlain(model)))
    text = Text(prompt, tuple(token for emitted in session.drain() for token in emitted.tokens))
    assert beside_checkpoint(tmp_path, model, [text], GREEDY).departures == ()
    wrong = replace(text, answer=(*text.answer[:-1], (text.answer[-1] + 1) % 50))
    (last,) = beside_checkpoint(tmp_path, model, [wrong], GREEDY).departures
    assert last.is_error == (family != "mixtral")
    assert (last.rounding is None) == (family == "mixtral")


def test_an_answer_without_tokens_is_no_difference(folder: Path) -> None:
    engine = vivace.load(folder)
    found = beside_checkpoint(folder, engine.model, [Text((1, 2), ()), *answers(engine)[:1]], GREEDY)
    assert (found.num_prompts, found.num_tokens, found.departures) == (2, 24, ())


CHECK = ("check", "--methods", "lookup", "--limit", 2, "--max-new-tokens", 6, "--model")
BENCH = ("bench", "decode", "--methods", "plain,lookup", "--limit", 2, "--max-new-tokens", 6, "--repeats", 1, "--model")


def test_commands_say_how_plain_decoding_fares(cli: Callable[..., Outcome], folder: Path) -> None:
    told = cli(*CHECK, folder)
    assert (told.status, told.out.splitlines()[0][:43]) == (0, "plain: identical: yes (2 of 2 answers besid")
    assert cli(*CHECK, folder, "--json").json["plain"]["identical"]
    report = cli(*BENCH, folder, "--json", "-").json
    assert report["plain"]["departures"] == []
    assert report["plain"]["num_tokens"] == sum(run["num_tokens"] for run in report["runs"] if run["method"] == "plain")
    assert [run["identical"] for run in report["runs"]] == [True, True]
    assert (
        "the same weights and kernels" in cli(*CHECK, folder, "--weights", "int8", "--json").json["plain"]["reference"]
    )


@pytest.mark.parametrize(("gap", "status"), [(0.1, 0), (0.2, 1)])
def test_commands_end_with_an_error_above_rounding(
    cli: Callable[..., Outcome], folder: Path, monkeypatch: pytest.MonkeyPatch, gap: float, status: int
) -> None:
    one = Departure(1, 3, 5, 6, gap, 0.05, 0.125)
    monkeypatch.setattr(reference, "beside_checkpoint", lambda *_, **__: Plainness(2, 12, (one,)))
    told = cli(*CHECK, folder)
    assert told.status == status
    assert (
        told.out.splitlines()[1]
        == f"  prompt 2, token 4: logits {gap} apart, the top two 0.05, rounding explains 0.125"
    )
    assert ("1 of 12 tokens that rounding does not explain" in told.err) == bool(status)
    measured = cli(*BENCH, folder, "--json", "-")
    assert measured.status == status
    plain, lookup = measured.json["runs"]
    assert (plain["identical"], plain["num_different"], lookup["identical"]) == (False, 1, True)
    assert measured.json["plain"]["departures"][0]["is_error"] == bool(status)


def test_a_command_ends_with_an_error_if_logits_are_far(
    cli: Callable[..., Outcome], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "beside_checkpoint", lambda *_, **__: Plainness(2, 12, (), 0.2, 0.1))
    told = cli(*CHECK, folder)
    assert told.status == 1
    assert "  its logits are 0.2 from float32's, those of PyTorch 0.1" in told.out
    assert "logits of plain decoding are 0.2 from float32's, where rounding explains about 0.1" in told.err
    monkeypatch.setattr(reference, "beside_checkpoint", lambda *_, **__: Plainness(2, 12, (), 0.14, 0.1))
    assert cli(*CHECK, folder).status == 0


def test_codes_of_a_file_are_compared_with_the_file_and_have_no_bound(
    cli: Callable[..., Outcome], folder: Path, tmp_path: Path
) -> None:
    """Inputs in eight bits are farther from float32 than bfloat16 is: that is told, and is no error."""
    assert cli("compress", str(tmp_path / "few"), "--model", str(folder), "--bits", "4", "--method", "rtn").status == 0
    found = cli("check", str(tmp_path / "few"), "--methods", "lookup", "--limit", "2", "--max-new-tokens", "8")
    assert found.status == 0, found.err
    assert "from float32's, inputs are in eight bits" in found.out + found.err


def test_prompts_of_token_ids_need_no_tokenizer(cli: Callable[..., Outcome], folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, bare)
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6, 7, 5, 6]}\n{"prompt": [9]}\n', encoding="utf-8")
    told = cli("check", bare, "--methods", "lookup", "--prompts", tmp_path / "ids.jsonl", "--batch", 2)
    assert told.status == 0
    assert told.out.splitlines()[0].startswith("plain: identical: yes (2 of 2 answers")
    assert "lookup: identical: yes (2 of 2 answers)" in told.out
    refused = cli("check", bare, "--methods", "lookup", "--prompts", "e2e", "--limit", 1)
    assert refused.status == 2
    assert "this checkpoint has no tokenizer, so a text cannot be read; give token ids" in refused.err
