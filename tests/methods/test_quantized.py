"""Drafts by the model itself with quantized weights: the text of plain decoding, in fewer passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.decode.runs import finish
from tests.decode.steps_at_once import packed
from tests.decode.tiny_decoders import VOCAB, prompts
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.kernels.low_bit import TABLE, LowBit, q4_of, quantise, search_q4
from vivace.kernels.native import NativeBody
from vivace.methods.quantized.calibration import quantized_for
from vivace.methods.quantized.drafter import LOOKUP, OwnGuess, QuantizedDrafter
from vivace.methods.quantized.stored import copies_of
from vivace.prompts import Prompt
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.kinds import recipe_of
from vivace.recipes.trainer import train_beside
from vivace.serve.catalog import Catalog
from vivace.train.data import TokenBatch, sample_of
from vivace.train.report import Lines
from vivace.tuning import candidates_of, keep_plan, planned, write_vocabulary

PLANS = (
    DraftPlan((1, 1, 1), weights="q4"),
    DraftPlan((1,) * 6, 0.3, "q4"),
    DraftPlan((1, 1), weights="int8"),
)


@pytest.fixture
def model(body: NativeBody) -> Decoder:
    return packed("plain", body)


def drafter_of(model: Decoder, plan: DraftPlan, ids: torch.Tensor | None = None) -> QuantizedDrafter:
    return QuantizedDrafter(model, OwnGuess(model), plan, DraftHead(model, ids))


SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(do_sample=True, temperature=0.8),
    "nucleus": Sampling(do_sample=True, temperature=1.1, top_p=0.9),
}


@pytest.mark.slow_where(
    lambda ids, steps, sampling, **_: ids is not None and (steps == 0 or sampling is SAMPLINGS["nucleus"])
)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("ids", [None, torch.arange(0, VOCAB, 2)], ids=["all", "half"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_the_text_is_plain_decodings(
    model: Decoder, plan: DraftPlan, ids: torch.Tensor | None, steps: int, sampling: Sampling
) -> None:
    """Token for token, with guesses accepted, in one native call and step by step, alone and together; a drawn text is
    that of its seed.
    """
    asked = [Request(tuple(tokens), 24, NoDrafts(), sampling=sampling, seed=5) for tokens in prompts(4)]
    for slots in (1, 4):
        session = Session(model, num_slots=slots, capacity=96, steps_per_call=steps)
        plain = finish(session, asked)
        drafter = drafter_of(model, plan, ids)
        found = finish(session, [replace(request, drafter=drafter) for request in asked])
        assert [r.tokens for r in found] == [r.tokens for r in plain]
        assert sum(r.stats.num_accepted_draft_tokens for r in found) > 10


@pytest.mark.parametrize("steps", [0, 3])
def test_what_repeats_itself_is_looked_up(model: Decoder, steps: int) -> None:
    """The text is the same, and some drafts are longer than the plan's."""
    drafter = QuantizedDrafter(model, OwnGuess(model), DraftPlan((1, 1), weights="q4"), lookup=PromptLookup(LOOKUP))
    asked = [Request(tuple(tokens) * 3, 32, NoDrafts()) for tokens in prompts(3)]
    for slots in (1, 3):
        session = Session(model, num_slots=slots, capacity=160, steps_per_call=steps)
        plain = finish(session, asked)
        found = finish(session, [replace(request, drafter=drafter) for request in asked])
        assert [r.tokens for r in found] == [r.tokens for r in plain]
        depths = [len(r.stats.drafted_per_position) for r in found]
        assert slots > 1 or max(depths) > 2, depths


def test_a_long_chain_is_seldom_wrong(model: Decoder) -> None:
    """Its rows read the text's own entries, and one another's, so that it guesses what the model says itself."""
    drafter = drafter_of(model, DraftPlan((1,) * 6, weights="int8"))
    session = Session(model, num_slots=1, capacity=96)
    found = finish(session, [Request(tuple(tokens), 32, drafter) for tokens in prompts(4)])
    made, kept = (sum(getattr(r.stats, f"num_{which}draft_tokens") for r in found) for which in ("", "accepted_"))
    assert kept > 0.8 * made > 0


def test_drawn_texts_are_those_of_a_seed(model: Decoder) -> None:
    hot, drafter = Sampling(do_sample=True, temperature=1.2), drafter_of(model, PLANS[0])
    asked = [Request(tuple(tokens), 24, drafter, sampling=hot, seed=1) for tokens in prompts(3)]
    alone = [finish(Session(model, num_slots=1, capacity=96), [request])[0].tokens for request in asked]
    assert [r.tokens for r in finish(Session(model, num_slots=3, capacity=96), asked)] == alone


def test_formats_are_copied_once_for_all_sizes_of_a_vocabulary(model: Decoder) -> None:
    guess = OwnGuess(model)
    made = [QuantizedDrafter(model, guess, PLANS[0], DraftHead(model, ids)) for ids in (None, torch.arange(9), None)]
    assert len(made) == 3
    (copies,) = [value for rows, value in model.backend.chain._copies.items() if rows is guess.draft_rows]  # type: ignore[union-attr]
    assert list(copies) == ["q4"]


@pytest.mark.parametrize("plan", [DraftPlan((2, 1), weights="q4"), DraftPlan((1, 1))], ids=lambda plan: plan.label)
def test_other_plans_are_refused(model: Decoder, plan: DraftPlan) -> None:
    with pytest.raises(ConfigError, match="chains with quantized weights"):
        drafter_of(model, plan)


@pytest.mark.parametrize(
    ("load", "why"),
    [
        ({"dtype": "bfloat16", "kernels": "torch"}, "native calls"),
        ({"dtype": "float32"}, "native calls"),
        ({"dtype": "bfloat16", "weights": "q4"}, "quantized already, to q4"),
    ],
)
def test_models_that_cannot_draft_so_say_why(tmp_path: Path, load: dict[str, str], why: str) -> None:
    """And list the method among those that are ready no more than ``auto`` tries it."""
    engine = vivace.load(make_checkpoint(tmp_path / "m"), **load)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=f"method quantized cannot run on this model: .*{why}"):
        engine.generate("a", method="quantized")
    assert "quantized" not in engine.methods.ready()


def test_a_server_takes_it_without_training(tmp_path: Path, body: NativeBody) -> None:
    folder = make_checkpoint(tmp_path / "m")
    catalog = Catalog(vivace.load(folder, dtype="bfloat16", kernels=body.name), "m", "auto", {})
    assert catalog.method("m", "quantized+lookup") == "quantized+lookup"
    assert "multirate" not in catalog.methods("m"), "it has no weights"
    catalog = Catalog(vivace.load(folder, dtype="float32", kernels=body.name), "m", "auto", {})
    assert not {"quantized", "quantized+lookup"} & set(catalog.methods("m"))


def test_auto_tries_it_once_it_was_tuned(tmp_path: Path, body: NativeBody) -> None:
    """Making its copies takes time and memory, so nobody who did not ask pays for them."""
    engine = vivace.load(make_checkpoint(tmp_path / "m", layers=4), dtype="bfloat16", kernels=body.name)
    names = lambda: [drafter.name for drafter in engine.methods.drafter("auto").drafters]  # type: ignore[attr-defined]  # noqa: E731
    assert "quantized+lookup" not in names()
    plan = next(plan for plan in candidates_of(engine, "quantized", 4) if plan.label == "chain 2 in q4")
    keep_plan(engine, "quantized", plan)
    engine = vivace.load(tmp_path / "m", dtype="bfloat16", kernels=body.name)
    assert "quantized+lookup" in names()
    assert len(engine.methods.drafter("quantized").plan.widths) == 2  # type: ignore[attr-defined]


def test_its_draft_vocabulary_needs_no_weights(tmp_path: Path, body: NativeBody) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "m", layers=4), dtype="bfloat16", kernels=body.name)
    write_vocabulary(engine, "quantized", ["aka bob"])
    found = planned(engine, DraftPlan((1, 1), weights="q4", vocabulary=9))
    assert len(found.methods.drafter("quantized").head.ids) == 9  # type: ignore[attr-defined]
    plain = engine.generate("aka", method="plain", max_new_tokens=12)[0].text
    assert found.generate("aka", method="quantized", max_new_tokens=12)[0].text == plain


def correlated(count: int, width: int) -> torch.Tensor:
    """Inputs most of whose variance lies in a few directions, as those of a model do."""
    return torch.randn(count, 8) @ torch.randn(8, width) + 0.1 * torch.randn(count, width)


@pytest.mark.parametrize("width", [64, 100, 192])
def test_outputs_change_less_than_with_weights_rounded_one_by_one(width: int) -> None:
    torch.manual_seed(3)
    x, weight = correlated(500, width), torch.randn(24, width).bfloat16()
    made = q4_of(*quantized_for(weight, x.mT @ x), width)
    alone = quantise(weight, "q4")
    assert isinstance(alone, LowBit)
    lost = [(x @ (kept.dense() - weight.float()).mT).square().sum() for kept in (made, alone)]
    assert lost[0] < 0.5 * lost[1]


def test_codes_are_laid_out_as_the_quantizer_does() -> None:
    weight = torch.randn(40, 128).bfloat16()
    codes, scales = search_q4(weight)
    made = q4_of(codes, scales, 128)
    entries = torch.tensor(TABLE).float()[codes.int()].view(40, -1, 64)
    assert torch.equal(made.dense(), (entries * scales.float()[:, :, None]).view(40, 128))


def test_inputs_that_are_never_seen_do_no_harm() -> None:
    codes, scales = quantized_for(torch.randn(16, 64), torch.zeros(64, 64))
    assert q4_of(codes, scales, 64).dense().isfinite().all()


def test_calibration_takes_as_many_tokens_as_were_asked_for_of_short_texts_and_long_ones() -> None:
    lengths = [8 * n for n in range(1, 25)]  # in order, as batches come
    batches = [TokenBatch(torch.zeros(2, n, dtype=torch.long), torch.zeros(2, n).bool()) for n in lengths]
    found = [batch.tokens.shape[1] for batch in sample_of(batches, 1600)]
    assert 1600 <= 2 * sum(found) < 1600 + 2 * found[-1] + 1
    assert len(set(found)) == len(found)
    assert min(found) < 96 < max(found)
    assert len(sample_of(batches, 10**6)) == len(batches)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model beside which ``vivace train quantized`` has put its layers."""
    folder = make_checkpoint(tmp_path_factory.mktemp("m"), layers=4)
    rows = [Prompt(f"aka {n} bob", (f"the fox {n} aka the quick bob fox",)) for n in range(24)]
    values = {"kind": "quantized", "held_back": 4, "calibration_tokens": 512, "tokens_per_batch": 64}
    recipe = recipe_of({**values, "plan": {"widths": [1, 1], "weights": "q4", "vocabulary": 64}})
    assert isinstance(recipe, FrozenRecipe)
    engine = vivace.load(folder, dtype="bfloat16", kernels="torch")
    train_beside(recipe, engine, rows, folder / "adapters" / "quantized", Lines(lambda line: None))
    return folder


def test_layers_that_were_quantized_for_a_text_draft(trained: Path, body: NativeBody) -> None:
    engine = vivace.load(trained, dtype="bfloat16", kernels=body.name)
    drafter = engine.methods.drafter("quantized")
    assert len(drafter.guess.draft_rows.copies) == 4 * 5  # type: ignore[attr-defined]
    assert len(drafter.head.ids) == 64  # type: ignore[attr-defined]
    found, plain = (engine.generate("aka bob", method=name, max_new_tokens=24)[0] for name in ("quantized", "plain"))
    assert found.text == plain.text
    assert found.stats.num_accepted_draft_tokens > 0


def test_a_model_in_float32_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "model"), dtype="float32", kernels="torch")
    recipe = recipe_of({"kind": "quantized", "own_tokens": 2000})
    assert isinstance(recipe, FrozenRecipe)
    with pytest.raises(UnsupportedError, match="for bfloat16 weights, and these are float32"):
        train_beside(recipe, engine, [], tmp_path / "out", Lines(lambda line: None))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["layers.4.qkv.codes", "layers.0.qkv.codes", "layers.0.left.codes", "other.codes"])
def test_layers_of_another_shape_are_refused(trained: Path, body: NativeBody, name: str) -> None:
    engine = vivace.load(trained, dtype="bfloat16", kernels=body.name)
    with pytest.raises(MismatchError, match="quantized weights"):
        copies_of(engine.model, {name: torch.zeros(3, 4, dtype=torch.uint8)})


def test_weights_without_loss_draft_and_verify(trained: Path, body: NativeBody) -> None:
    """In twelve bits the matrices of the model are the same numbers, and so is what drafts for it."""
    engine = vivace.load(trained, weights="exact12", dtype="bfloat16", kernels=body.name)
    found, plain = (engine.generate("aka bob", method=name, max_new_tokens=24)[0] for name in ("quantized", "plain"))
    assert found.token_ids == plain.token_ids
    assert found.stats.num_accepted_draft_tokens > 0
