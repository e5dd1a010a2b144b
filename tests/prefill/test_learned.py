"""Scores that are learnt: a planted head and planted maps are found, files are checked, and a session reads by them."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.cli.app import run as run_cli
from vivace.core.step import Step
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.prefill.learned import Maps, normed
from vivace.prefill.lessons import (
    Example,
    choose_heads,
    loss_of,
    observe,
    residuals,
    target_in,
    target_of,
    teach,
    teachers_of,
)
from vivace.prefill.passages import by_passages, divide, largest
from vivace.prefill.scores import BLOCK, SINKS, by_masses
from vivace.recipes.lazy_plan import TriedSchedule, _keeps

LAYERS = 6
PROMPT = [1 + (11 * place + place // 7) % 290 for place in range(301)]
BREAKS = [PROMPT[60], PROMPT[130], PROMPT[190]]
GREEDY: dict[str, Any] = {"do_sample": False, "ignore_eos": True, "max_new_tokens": 8, "method": "plain"}


@pytest.fixture(scope="module", params=[0, 40], ids=["window", "window and opening"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model beside which scores lie that nothing has taught; those of the window alone in the form they first had."""
    folder, opening = make_checkpoint(tmp_path_factory.mktemp("model"), context=512, layers=LAYERS), request.param
    generator = torch.Generator().manual_seed(3)
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    maps = {f"{side}.2": torch.randn(4, width, generator=generator) for side in ("query", "key")}
    maps["weight.2"] = torch.randn((2, width) if opening else width, generator=generator) / 8
    heads = [{"point": 2, "heads": [1]}, {"point": 4, "heads": [0, 1]}]
    config = {"window": 16, "rank": 4, "breaks": BREAKS, "layers": [2], "heads": heads}
    config |= {"opening": opening} if opening else {}
    save_adapter(folder / "adapters" / "lazy", "lazy", base_hash(folder), {"keep": "2:0.4:taught"}, config, maps)
    return folder


@pytest.fixture(scope="module", params=[("torch", "float32"), ("auto", "bfloat16")], ids=str)
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    kernels, dtype = request.param
    return vivace.load(folder, kernels=kernels, dtype=dtype)


def test_by_masses_keeps_ends_and_the_heaviest_blocks() -> None:
    masses = torch.full((300,), 0.01)
    masses[SINKS + 2 * BLOCK + 5] = 3.0
    masses[SINKS + 5 * BLOCK] = 2.0
    found = by_masses(masses, SINKS + BLOCK + 10 + 20, 20).tolist()
    wanted = [*range(SINKS), *range(SINKS + 2 * BLOCK, SINKS + 3 * BLOCK)]
    assert found == [*wanted, *range(SINKS + 5 * BLOCK, SINKS + 5 * BLOCK + 10), *range(280, 300)]
    for length, count, window in [(1, 1, 32), (40, 40, 32), (40, 39, 32), (40, 5, 32), (35, 34, 32), (100, 36, 32)]:
        places = by_masses(torch.rand(length), count, window).tolist()
        assert len(places) == count
        assert places == sorted(set(places))
        assert places[-1] == length - 1


def test_a_prompt_is_divided_at_its_lines() -> None:
    """Short lines go with the next one, long ones are divided evenly, and the ends are no passages."""
    tokens = [1] * 700
    for end in (9, 43, 60, 130, 400):
        tokens[end] = 7
    assert divide(tokens, {7}, 20) == (SINKS, 40, 87, 90, 90, 90, 93, 93, 93, 20)
    assert divide([1] * 300, (), 32) == (4, 88, 88, 88, 32)
    assert divide([1] * 30, {1}, 32) == (0, 30)
    assert divide(tokens, {7}, 20, 50) == (50, 81, 90, 90, 90, 93, 93, 93, 20), "the opening ends within a line"
    for length in (1, 5, 37, 200):
        assert sum(divide([7] * length, {7}, 32)) == length
        assert sum(divide([7] * length, {7}, 32, 64)) == length


def test_passages_go_on_as_a_whole() -> None:
    lengths, scores = (4, 50, 60, 70, 20), torch.tensor([1.0, 3.0, 2.0])
    found = by_passages(scores, lengths, 4 + 60 + 9 + 20).tolist()
    assert found == [*range(4), *range(54, 114), *range(114, 123), *range(184, 204)]
    for count in (1, 19, 20, 23, 100, 203, 204):
        places = by_passages(scores, lengths, count).tolist()
        assert len(places) == count
        assert places == sorted(set(places))
        assert places[-1] == 203
    assert by_passages(torch.empty(0), (0, 30), 7).tolist() == [*range(23, 30)]


def test_the_line_that_the_window_cuts_goes_on() -> None:
    lengths, scores = (4, 50, 60, 70, 9, 20), torch.tensor([1.0, 3.0, 2.0, 0.0])
    found = by_passages(scores, lengths, 4 + 60 + 9 + 20).tolist()
    assert found == [*range(4), *range(54, 114), *range(184, 193), *range(193, 213)]
    assert by_passages(scores, lengths, 4 + 5 + 20).tolist() == [*range(4), *range(184, 189), *range(193, 213)]


@pytest.mark.parametrize("sides", [1, 2], ids=["window", "window and opening"])
def test_a_passage_has_the_sum_of_the_best_matches(sides: int) -> None:
    """The late interaction, beside loops over tokens."""
    torch.manual_seed(0)
    maps, hidden, lengths = (
        Maps(torch.randn(3, 8), torch.randn(3, 8), torch.randn(sides, 8)),
        torch.randn(31, 8),
        (4, 9, 13, 5),
    )
    asking = [(q, maps.weight[0]) for q in range(26, 31)]
    asking += [(q, maps.weight[1]) for q in range(4) if sides == 2]
    x = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = []
    for start, stop in ((4, 13), (13, 26)):
        total = 0.0
        for q, weight in asking:
            best = max(float((maps.query @ x[q]) @ (maps.key @ x[i])) for i in range(start, stop))
            total += best / 3**0.5 * float(torch.log1p((x[q] @ weight).exp()))
        wanted.append(total)
    assert torch.allclose(maps.scores(hidden, lengths), torch.tensor(wanted), atol=1e-4)


def test_a_session_keeps_what_the_maps_say(engine: Engine) -> None:
    """The residuals at the point are those of a full reading; the plan is taken where no schedule is given."""
    [result] = engine.generate(PROMPT, **GREEDY, prefill="lazy", min_prompt=1)
    count = ceil(0.4 * 301)
    assert result.stats.prompt_kept == [[2, count]]
    model, maps = engine.model, engine.prefills.learned.maps[2]
    with torch.inference_mode():
        lesson = observe(model, PROMPT, [5], [2], 16, 4)
        lengths = divide(PROMPT, BREAKS, 16, engine.prefills.learned.config.opening)
        assert len(lengths) > 4, "there are passages"
        kept = by_passages(maps.scores(lesson.hidden[2], lengths), lengths, count)
        session = Session(model, num_slots=1, capacity=400)
        session.admit(engine.request(PROMPT, Options.of({**GREEDY, "prefill": "lazy", "min_prompt": 1})))
        while session.cache.lengths[0] < 300:
            session.step()
        step = Step.packed(session.cache, [0] * count, kept, torch.arange(count))
        layer = model.layers[2]
        keys = layer._heads(lesson.hidden[2][kept].to(model.dtype), step)[0][:, model.config.num_heads :]
        session.cache.prune(0, [0] * LAYERS)
        stored = session.cache.span(2, 0, 0, count - 1)[0].transpose(0, 1)
    assert torch.allclose(stored.float(), keys[:-1].float(), atol=0.05)


def test_a_session_keeps_what_the_heads_read(engine: Engine) -> None:
    """Below the point the window reads what it reads in a full reading."""
    [result] = engine.generate(PROMPT, **GREEDY, prefill="lazy", keep="2:0.4:heads,4:0.5:heads", min_prompt=1)
    count = ceil(0.4 * 301)
    assert result.stats.prompt_kept == [[2, count], [4, ceil(0.5 * count)]]
    seen: list[torch.Tensor] = []
    request = engine.request(PROMPT, Options.of({**GREEDY, "prefill": "lazy", "keep": "2:0.4:heads", "min_prompt": 1}))
    session = Session(engine.model, num_slots=1, capacity=400)
    session.admit(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vivace.prefill.pruned.largest", lambda m, parts: seen.append(m.clone()) or largest(m, parts))
        while session.cache.lengths[0] < 300:
            session.step()
    with torch.inference_mode():
        lesson = observe(engine.model, PROMPT, [5], [2], 16, 4)
    assert torch.allclose(seen[0], lesson.asked[1][1].float(), atol=2e-2)
    full = engine.generate(PROMPT, **GREEDY)[0]
    other = engine.generate(PROMPT, **GREEDY, prefill="lazy", keep="2:1:heads", min_prompt=1)[0]
    assert other.token_ids == full.token_ids, "asking stores nothing"


def test_learnt_scores_ride_with_drafts_and_with_tokens_that_come_back(engine: Engine) -> None:
    way: dict[str, Any] = {"prefill": "lazy", "keep": "2:0.4:taught,4:0.5:heads", "min_prompt": 1}
    texts = [engine.generate(PROMPT, **{**GREEDY, **way, "method": m})[0].token_ids for m in ("plain", "lookup")]
    assert texts[0] == texts[1]
    back = engine.generate(PROMPT, **GREEDY, **way, decode_keep="same")[0]
    assert back.token_ids[0] == texts[0][0]
    assert sum(map(sum, back.stats.came_back)) > 5


def test_heads_that_copy_are_the_teachers_and_heads_that_find_are_chosen() -> None:
    torch.manual_seed(0)
    asked, wanted = [], []
    for place in (40, 150, 210, 300):
        wanted.append(torch.zeros(400))
        wanted[-1][place : place + 10] = 0.1
        asked.append(torch.rand(5, 400) * 0.01)
        asked[-1][3, place - 2 : place + 12] += 1.0
    heads, share = choose_heads(asked, wanted, 0.3, [(4, *[32] * 11, 28, 16)] * 4)
    assert heads == [3]
    assert share > 0.99


@pytest.mark.parametrize(("seed", "asker"), [(0, -3), (1, -3), (0, 2)], ids=["end", "end too", "opening"])
def test_maps_learn_what_is_wanted(seed: int, asker: int) -> None:
    """A token that has the same mark as one in the window or the opening is wanted; its block is found elsewhere."""
    torch.manual_seed(seed)
    marks = torch.randn(12, 24)

    def text() -> tuple[torch.Tensor, torch.Tensor]:
        hidden, place, mark = torch.randn(288, 24), int(torch.randint(8, 250, ())), int(torch.randint(0, 12, ()))
        hidden[place] += 4 * marks[mark]
        hidden[asker] += 4 * marks[mark]
        for other in torch.randint(8 if asker > 0 else 0, 250, (6,)).tolist():
            if other != place:
                hidden[other] += 4 * marks[(mark + 1 + other % 11) % 12]
        return hidden, torch.nn.functional.one_hot(torch.tensor(place), 288).float()

    lengths = (4, *[32] * 8, 20, 8)

    def share(maps: Maps, found: tuple[torch.Tensor, torch.Tensor]) -> float:
        """What goes on of it: two passages and a part, besides the ends and the short passage before the window."""
        return float(found[1][by_passages(maps.scores(found[0], lengths), lengths, 88 + 20)].sum())

    maps = teach([Example(*text(), lengths) for _ in range(160)], rank=16, steps=120, seed=0, opening=asker > 0)
    unseen = [text() for _ in range(30)]
    untaught = Maps(torch.randn(16, 24), torch.randn(16, 24), torch.zeros(1, 24))
    assert sum(share(maps, each) for each in unseen) / 30 > 0.8
    assert sum(share(untaught, each) for each in unseen) / 30 < 0.45


def test_a_batch_sets_passages_of_all_prompts_against_each_other() -> None:
    """The loss of two prompts is the mean of two cross entropies over the passages of both, whose ends differ."""
    torch.manual_seed(1)
    maps = Maps(torch.randn(3, 8), torch.randn(3, 8), torch.randn(2, 8))
    wanted = [torch.zeros(31), torch.zeros(31)]
    wanted[0][5], wanted[1][20] = 1.0, 1.0
    parts = (4, 9, 13, 5), (2, 9, 14, 6)
    batch = [Example(torch.randn(31, 8), want, own) for want, own in zip(wanted, parts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vivace.prefill.lessons._DROPOUT", 0.0)
        loss = loss_of(maps, batch, torch.Generator())
    x = [normed(each.hidden) for each in batch]
    losses = []
    for asker, goal in ((0, 0), (1, 3)):
        asking = maps.asking(x[asker], parts[asker])
        assert len(asking[0]) == parts[asker][0] + parts[asker][-1]
        found = [maps.matches(*asking, each, own).sum(1) for each, own in zip(x, parts, strict=True)]
        losses.append(-torch.cat(found).log_softmax(0)[goal])
    assert torch.allclose(loss, torch.stack(losses).mean(), atol=1e-5)


@torch.inference_mode()
def test_only_passages_that_name_the_answer_count(engine: Engine) -> None:
    lesson = observe(engine.model, PROMPT[:120], [PROMPT[7]], [2], 16, 3)
    named = torch.zeros(120, dtype=torch.bool)
    named[40:60] = True
    parts = (4, 100, 16)
    want = target_of(lesson, teachers_of([lesson]), parts, named)
    assert want is not None
    assert float(want[40:60].sum()) == pytest.approx(1)
    without = target_of(lesson, teachers_of([lesson]), parts, torch.zeros(120, dtype=torch.bool))
    assert without is not None
    assert float(without[40:60].sum()) < 0.9


@torch.inference_mode()
def test_a_lesson_has_what_the_answer_read(engine: Engine) -> None:
    lesson = observe(engine.model, PROMPT[:120], [PROMPT[7]], [2, 4], 16, 3)
    config = engine.model.config
    assert lesson.reads.shape == (LAYERS, config.num_heads, 120)
    assert torch.allclose(lesson.reads.float().sum(-1), torch.ones(LAYERS, config.num_heads), atol=0.05)
    assert lesson.asked.shape == (3, config.num_heads, 120)
    assert torch.allclose(lesson.asked.float().sum(-1), torch.full((3, config.num_heads), 16.0), atol=0.3)
    assert {point: tuple(h.shape) for point, h in lesson.hidden.items()} == {
        2: (120, config.width),
        4: (120, config.width),
    }
    assert 0 < float(lesson.copies.max()) <= 1.001
    assert len(teachers_of([lesson])) == 5
    assert target_of(lesson, teachers_of([lesson]), (4, 100, 16)) is not None


def test_residuals_are_those_of_a_full_reading(engine: Engine) -> None:
    """A prompt that is longer than a chunk, read up to a point only; its target is where the answer's words stand."""
    lesson = observe(engine.model, PROMPT, [5], [2, 4], 16, 3)
    found = residuals(engine.model, PROMPT, [4, 2])
    assert {point: each.shape for point, each in found.items()} == {p: h.shape for p, h in lesson.hidden.items()}
    for point, hidden in lesson.hidden.items():
        assert torch.allclose(found[point].float(), hidden.float(), atol=0.05)
    named = torch.zeros(301, dtype=torch.bool)
    named[100:140] = named[290:] = named[0] = True
    want = target_in(named, (50, 235, 16))
    assert want is not None
    assert want.tolist() == pytest.approx([1 / 40 if 100 <= place < 140 else 0 for place in range(301)])
    assert target_in(torch.zeros(301, dtype=torch.bool), (50, 235, 16)) is None


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("2:0.5:tought", "keep has the score 'tought' behind layer 2; did you mean 'taught'?"),
        ("3:0.5:taught", "keep scores layer 3 by taught;"),
        ("3:0.5:heads", "has it for 2, 4"),
        ("2:0.5:", "keep has the score ''"),
        ("inf%:0.5", "keep has 'inf%:0.5'; write LAYER:SHARE"),
    ],
)
def test_scores_that_there_are_not(engine: Engine, keep: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.generate(PROMPT, **GREEDY, prefill="lazy", keep=keep, min_prompt=1)
    assert message in str(caught.value)
    assert caught.value.field == "keep"
    with pytest.raises(ConfigError, match="this way of reading has one score"):
        engine.generate(PROMPT, **GREEDY, prefill="static", keep="2:0.5:taught", min_prompt=1)


def test_a_model_without_them_and_those_of_another(folder: Path, tmp_path: Path) -> None:
    bare = vivace.load(make_checkpoint(tmp_path / "bare", context=512, layers=LAYERS))
    with pytest.raises(UnsupportedError, match="vivace train lazy --model MODEL --data FILE"):
        bare.generate(PROMPT, **GREEDY, prefill="lazy", keep="2:0.5:taught", min_prompt=1)
    other = make_checkpoint(tmp_path / "other", context=512, layers=LAYERS - 1)
    (other / "adapters").mkdir()
    (other / "adapters" / "lazy").symlink_to(folder / "adapters" / "lazy")
    with pytest.raises(MismatchError, match="was trained on base"):
        vivace.load(other).generate(PROMPT, **GREEDY, prefill="lazy", min_prompt=1)


def test_train_and_tune_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model", context=2048, layers=4)
    rows = [
        {
            "prompt": " ".join(f"the {word} of {place + word} is {7 * word % 50}." for word in range(60)),
            "reference": "7",
        }
        for place in range(12)
    ]
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run_cli(["train", "lazy", "--model", str(folder)]) == 2
    assert "say what to learn from: --data FILE" in capsys.readouterr().err
    assert run_cli(["train", "lazy", "rnk=3", "--model", str(folder), "--data", str(data)]) == 2
    assert "did you mean 'rank'" in capsys.readouterr().err
    assert run_cli(["train", "lazy", "opening=-1", "--model", str(folder), "--data", str(data)]) == 2
    assert "opening must be at least 0, found -1" in capsys.readouterr().err
    line = ["train", "lazy", "points=[2,4]", "--model", str(folder), "--data", str(data)]
    assert run_cli(line) == 2
    assert "points has layer 4; it must be from 1 to 3" in capsys.readouterr().err
    line = ["train", "lazy", "rank=4", "steps=5", "points=[2]", "whole=6", "--model", str(folder), "--data", str(data)]
    assert run_cli([*line, "--out", str(tmp_path / "few"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["point"] for each in found["scores"] if each["score"] == "taught"} == {2}
    assert run_cli(["train", "lazy", "rank=4", "steps=5", "--model", str(folder), "--data", str(data), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["score"] for each in found["scores"]} == {"heads", "taught"}
    written = json.loads((folder / "adapters" / "lazy" / "config.json").read_text())
    assert written["plan"]["keep"].endswith(":0.3:taught")
    assert written["config"]["opening"] == 64
    assert run_cli(["tune", "lazy", "--floor", "1.5", "--model", str(folder), "--prompts", str(data)]) == 2
    assert "--floor is 1.5; it must be in (0, 1]" in capsys.readouterr().err
    assert run_cli(["tune", "multirate", "--floor", "0.9", "--model", str(folder), "--prompts", str(data)]) == 2
    assert "--floor has no effect on multirate" in capsys.readouterr().err
    line = ["tune", "lazy", "--floor", "0.01", "--model", str(folder), "--prompts", str(data), "--json"]
    assert run_cli(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["floor"] == 0.01
    assert len(found["trials"]) > 6
    plan = json.loads((folder / "adapters" / "lazy" / "config.json").read_text())["plan"]["keep"]
    assert plan == (written["plan"]["keep"] if found["confirmed"] is None else found["confirmed"]["keep"])


def test_a_floor_holds_in_the_sum_and_in_the_mean() -> None:
    def tried(kept: float, more: float) -> TriedSchedule:
        return TriedSchedule("5:0.3:taught", 9, 2.0, kept, more, 0.4)

    assert _keeps(tried(0.99, 0.05), 0.99)
    assert not _keeps(tried(0.98, 0.0), 0.99)
    assert not _keeps(tried(1.2, 0.06), 0.99), "a few sure prompts make up for no others"
    assert _keeps(tried(0.91, 0.14), 0.9)
