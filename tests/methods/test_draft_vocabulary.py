"""A draft vocabulary changes what is guessed and never the text, for every method and wherever its guesses are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import Noting, packed
from tests.decode.tiny_decoders import VOCAB, build, prompts
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace import tuning
from vivace.checkpoint.draft_vocabulary import FILE, save_vocabulary
from vivace.cli.app import run as run_command
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Draft, Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.errors import MismatchError, NotFoundError
from vivace.kernels.low_bit import Weights
from vivace.kernels.native import NativeBody
from vivace.methods.eagle.drafter import Eagle, EagleConfig, EagleLayer
from vivace.methods.early_exit.drafter import Exit, ExitConfig, exit_drafter
from vivace.methods.medusa.drafter import Medusa, MedusaConfig, MedusaHeads
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.drafter import AcceleratedGuess, drafter_by
from vivace.methods.multirate.residual import Accelerator
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter
from vivace.methods.multistream.streams import Streams
from vivace.methods.uno.drafter import Uno, UnoConfig, UnoDeltas
from vivace.tuning import SIZES, candidates_of, planned, vocabulary_candidates, write_vocabulary

IDS = torch.arange(0, VOCAB, 3)
CHAIN = (1, 1, 1)
Make = Callable[[Decoder, torch.Tensor | None, Weights], Drafter]


def noisy(weights: torch.nn.Module, model: Decoder) -> torch.nn.Module:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return weights.to(model.dtype).requires_grad_(False)


def multirate(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(Accelerator(MultirateConfig(3, "delta", 4, 8, True, (4,)), model.config), model)
    plan = DraftPlan(CHAIN, weights=weights)
    return drafter_by(AcceleratedGuess(model, made), plan, head=DraftHead(model, ids))


def unsure(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(Accelerator(MultirateConfig(3, "delta", 4, 8), model.config), model)
    plan = DraftPlan(CHAIN, 0.05, weights)
    return drafter_by(AcceleratedGuess(model, made), plan, head=DraftHead(model, ids))


def tree(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(Accelerator(MultirateConfig(3, "delta", 4, 8), model.config), model)
    return drafter_by(AcceleratedGuess(model, made), DraftPlan((2, 1)), head=DraftHead(model, ids))


def multistream(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(Streams(MultistreamConfig(streams=2, insertion_layer=4, rank=4, bottleneck=8), model.config), model)
    return StreamDrafter(model, made, StreamPlan((1, 1), "kept", weights=weights), DraftHead(model, ids))


def medusa(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(MedusaHeads(MedusaConfig(2), model.config), model)
    return Medusa(model, made, TreePlan((2, 1)), ids)


def medusa_shared(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(MedusaHeads(MedusaConfig(2, own_output=False), model.config), model)
    return Medusa(model, made, TreePlan((1, 1)), ids)


def eagle(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    return Eagle(model, noisy(EagleLayer(EagleConfig(), model.config), model), DraftPlan((1, 1)), DraftHead(model, ids))


def deed(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(Exit(ExitConfig(3, 8), model.config), model)
    return exit_drafter(model, made, DraftPlan(CHAIN, weights=weights), DraftHead(model, ids))


def uno(model: Decoder, ids: torch.Tensor | None, weights: Weights = "bf16") -> Drafter:
    made = noisy(UnoDeltas(UnoConfig(3, 4), model.config), model)
    return Uno(model, made, TreePlan((2, 1), 2), DraftHead(model, ids))


METHODS: dict[str, Make] = {
    made.__name__: made for made in (multirate, unsure, tree, multistream, medusa, medusa_shared, eagle, deed, uno)
}


def run(
    model: Decoder, drafter: Drafter, steps_per_call: int = 0, num_slots: int = 1, **fields: object
) -> list[Result]:
    requests = [Request(prompt, 9 + 3 * i, drafter, **fields) for i, prompt in enumerate(prompts(4, seed=2))]
    session = Session(model, num_slots=num_slots, capacity=64, chunk=8, steps_per_call=steps_per_call)
    return finish(session, requests)


def guesses(proposed: Sequence[object]) -> set[int]:
    """Tokens that were guessed in drafts."""
    found = set[int]()
    for draft in proposed:
        assert isinstance(draft, Draft)
        given = dict(zip(draft.slots, draft.committed, strict=True))
        found |= {
            token
            for token, slot, node in zip(
                *(line.tolist() for line in (draft.tokens, draft.slot, draft.node)), strict=True
            )
            if node >= given[slot]
        }
    return found


@pytest.mark.slow_where(lambda name, dtype: dtype == torch.float32 and name not in ("medusa", "eagle"))
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_its_tokens_are_guessed_and_the_text_is_the_same(name: str, dtype: torch.dtype) -> None:
    model = build(dtype, num_layers=6, seed=3).requires_grad_(False)
    whole, few = Noting(METHODS[name](model, None, "bf16")), Noting(METHODS[name](model, IDS, "bf16"))
    plain = [result.tokens for result in run(model, NoDrafts(), num_slots=4)]
    for noted in (whole, few):
        assert [result.tokens for result in run(model, noted, num_slots=4)] == plain
    allowed = set(IDS.tolist())
    assert guesses(whole.proposed) - allowed
    assert guesses(few.proposed) <= allowed
    assert len(guesses(few.proposed)) > 1


@pytest.mark.parametrize("name", ["multirate", "unsure", "deed", "multistream"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "q4"])
def test_native_steps_guess_the_same(body: NativeBody, name: str, weights: Weights) -> None:
    model = packed("plain", body)
    drafter = Noting(METHODS[name](model, IDS, weights))
    at_once = run(model, drafter, steps_per_call=4)
    assert max(drafter.steps) > 1
    drafter.proposed.clear()
    alone = run(model, drafter)
    assert [r.tokens for r in at_once] == [r.tokens for r in alone] == [r.tokens for r in run(model, NoDrafts())]
    if name != "multistream" or weights == "bf16":
        assert guesses(drafter.proposed) <= set(IDS.tolist())
    if name != "multistream":
        counts = [[r.stats.num_accepted_draft_tokens for r in results] for results in (at_once, alone)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["multirate", "tree", "eagle"])
def test_sampled_text_keeps_its_distribution_in_reach(name: str) -> None:
    """Drawn guesses have no probability outside the vocabulary; tokens outside it are still drawn."""
    model = build(torch.float32, num_layers=6, seed=3).requires_grad_(False)
    noted = Noting(METHODS[name](model, IDS, "bf16"))
    found = run(model, noted, sampling=Sampling(do_sample=True))
    assert guesses(noted.proposed) <= set(IDS.tolist())
    assert {token for result in found for token in result.tokens} - set(IDS.tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_checkpoint(tmp_path_factory.mktemp("base"))
    make_adapter(place / "adapters" / "multirate", place)
    return place


def test_it_lies_beside_the_weights_and_is_checked(folder: Path) -> None:
    plan = replace(DraftPlan.chain(3), vocabulary=100)
    engine, adapter = vivace.load(folder), folder / "adapters" / "multirate"
    with pytest.raises(NotFoundError, match="there is no draft_vocabulary"):
        planned(engine, plan).methods.drafter("multirate")
    save_vocabulary(adapter, torch.tensor([5, 0, *range(6, 320)]))
    with pytest.raises(MismatchError, match="does not begin with the end-of-text tokens"):
        planned(engine, plan).methods.drafter("multirate")
    save_vocabulary(adapter, torch.tensor([0, *range(10, 320)]))
    other = planned(engine, plan)
    drafter = other.methods.drafter("multirate")
    assert drafter.head.ids.tolist() == [0, *range(10, 109)]
    assert other.methods.drafter("multirate+lookup").head is drafter.head
    texts = [
        one.generate("aka", method=m, max_new_tokens=24)[0].token_ids
        for one, m in ((engine, "plain"), (other, "multirate"))
    ]
    assert texts[0] == texts[1]
    (adapter / FILE).unlink()


def test_tuning_tries_sizes_below_the_models_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vivace.load(folder)
    assert min(SIZES) >= engine.model.config.vocab_size
    monkeypatch.setattr(tuning, "SIZES", (100, 200, 4000))
    assert {plan.vocabulary for plan in candidates_of(engine, "multirate")} == {0}
    assert vocabulary_candidates(engine, "multirate", [DraftPlan.chain(2)]) == []
    write_vocabulary(engine, "multirate", ["aka bab", "aka"])
    assert {plan.vocabulary for plan in candidates_of(engine, "multirate")} == {200}
    found = vocabulary_candidates(engine, "multirate", [DraftPlan.chain(2), DraftPlan((2, 1), vocabulary=200)])
    assert [(plan.widths, plan.vocabulary) for plan in found] == [
        (widths, size) for widths in ((1, 1), (2, 1)) for size in (100, 200, 0)
    ]
    assert found[0].label == "chain 2 from 100 tokens"
    (folder / "adapters" / "multirate" / FILE).unlink()


def test_a_method_without_weights_gets_one(folder: Path) -> None:
    engine = vivace.load(folder)
    write_vocabulary(engine, "layerskip", ["aka"])
    other = planned(engine, replace(DraftPlan.chain(1), vocabulary=9))
    assert len(other.methods.drafter("layerskip").head.ids) == 9


def test_tuning_makes_it_from_answers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "aka", "reference": "bab bab"}\n' * 3)
    words = ["tune", "multirate", "--model", str(folder), "--answers", str(tmp_path / "own.jsonl"), "--no-keep"]
    assert run_command([*words, "--limit", "1", "--longest", "1", "--max-new-tokens", "4", "--quiet"]) == 0
    assert (folder / "adapters" / "multirate" / FILE).is_file()
