"""A pool of soft prompts: its entries, its choice, and every method behind it, beside an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import vivace
from tests.every_method import OF_MIXTURES, few_draw, load_for
from tests.tiny_checkpoints import make_checkpoint
from vivace.adapters.pool.choice import scores_of
from vivace.adapters.pool.pool import PromptPool, load_pool
from vivace.checkpoint.soft_prompt import load_soft_prompt, save_soft_prompt
from vivace.core.step import Step
from vivace.engine import Engine
from vivace.errors import CapacityError, ConfigError, CorruptError, MismatchError, NotFoundError, UnsupportedError
from vivace.evaluate.judging import JudgedSystem, judge
from vivace.evaluate.likelihood import LikelihoodReader, question_of
from vivace.evaluate.zeroshot import TaskRow
from vivace.methods.table import METHODS

PROMPTS = ["the quick brown fox the quick", "abc", "x", "aaaa bbbb aaaa", "bob aka bob aka"]
LOSSLESS = [name for name, spec in METHODS.items() if spec.lossless and name not in OF_MIXTURES]
HOT: dict[str, Any] = {"temperature": 1.3, "seed": 5}
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": True}


def drawn(width: int, counts: dict[str, int], scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: scale * torch.randn(count, width, generator=generator) for name, count in counts.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pooled"), layers=3, context=512)


def pooled(engine: Engine, counts: dict[str, int]) -> Engine:
    prompts = drawn(engine.model.config.width, counts)
    engine.prompt_pool = PromptPool(engine.model, prompts, engine.memory)
    return engine


@pytest.fixture(scope="module", params=["torch", "float32", "native"])
def engine(request: pytest.FixtureRequest, base: Path) -> Engine:
    how: dict[str, Any] = {
        "torch": {"kernels": "torch", "dtype": "float32"},
        "float32": {"dtype": "float32"},
        "native": {"dtype": "bfloat16"},
    }[request.param]
    return pooled(vivace.load(base, **how), {"one": 5, "two": 20, "long": 70})


def logits_behind(engine: Engine, embeddings: Tensor, tokens: list[int]) -> Tensor:
    """The plain path: embeddings prepended to those of the text, every logit of the text, (T, V)."""
    model, count = engine.model, len(embeddings)
    ids = torch.tensor(tokens)
    text = model.embed(ids, Step.dense(1, len(tokens)))
    rows = torch.cat((embeddings.to(model.dtype), text))
    with torch.inference_mode():
        return model.head(model.run(rows, Step.dense(1, len(rows))))[count:]


@pytest.mark.parametrize("name", ["one", "two", "long"])
def test_entries_are_those_of_embeddings_that_are_prepended(engine: Engine, base: Path, name: str) -> None:
    """Against our plain path, and transformers with ``inputs_embeds``, which is what PEFT's prompt tuning does."""
    embeddings = drawn(engine.model.config.width, {"one": 5, "two": 20, "long": 70})[name]
    is_exact = engine.model.dtype == torch.float32
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for prompt in PROMPTS:
        asked = engine.tokenizer.encode_prompt(prompt)
        [found] = engine.generate(prompt, method="plain", soft_prompt=name, **SETTINGS)
        assert found.stats.prompt_pool == name
        assert found.stats.num_prompt_tokens == len(asked)
        tokens = [*asked, *found.token_ids]
        rows = slice(len(asked) - 1, -1)
        text = theirs.get_input_embeddings()(torch.tensor([tokens]))
        with torch.inference_mode():
            whole = theirs(inputs_embeds=torch.cat((embeddings[None], text), 1)).logits[0, len(embeddings) :]
        for logits in (logits_behind(engine, embeddings, tokens), whole):
            want = torch.log_softmax(logits[rows].float(), -1)
            got = torch.tensor(found.logprobs)
            own = want[torch.arange(len(got)), torch.tensor(found.token_ids)]
            assert torch.allclose(got, own, atol=1e-4 if is_exact else 0.5), (got - own).abs().max()
            if is_exact:
                assert want.argmax(-1).tolist() == list(found.token_ids)


@pytest.mark.parametrize("sampling", [{}, HOT], ids=["greedy", "sampled"])
def test_a_ragged_batch_gives_each_what_it_has_alone(engine: Engine, base: Path, sampling: dict[str, Any]) -> None:
    members = ["one", "none", "long", "two", "auto"]
    requests = [
        engine.request(prompt, vivace.Options(soft_prompt=name, method="plain", **SETTINGS, **sampling))
        for prompt, name in zip(PROMPTS, members, strict=True)
    ]
    session = engine.session(requests, vivace.Options())
    for request in requests:
        session.admit(request)
    together: dict[int, tuple[int, ...]] = {}
    for event in session.drain():
        together[event.request_id] = together.get(event.request_id, ()) + event.tokens
    for place, (prompt, name) in enumerate(zip(PROMPTS, members, strict=True)):
        [alone] = engine.generate(prompt, method="plain", soft_prompt=name, **SETTINGS, **sampling)
        assert together[place] == alone.token_ids
    bare = vivace.load(base, dtype=str(engine.model.dtype).removeprefix("torch."), kernels=engine.kernels.name)
    [free] = bare.generate(PROMPTS[1], method="plain", **SETTINGS, **sampling)
    assert together[1] == free.token_ids


@few_draw("sampling", HOT)
@pytest.mark.parametrize("sampling", [{}, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", LOSSLESS)
def test_every_method_writes_what_plain_writes(
    tmp_path_factory: pytest.TempPathFactory, method: str, sampling: dict[str, Any]
) -> None:
    folder = _MODELS.setdefault("all", tmp_path_factory.mktemp("methods"))
    engine = pooled(load_for(folder, method, dtype="bfloat16"), {"one": 5, "long": 70})
    for name in ("one", "long"):
        want = engine.generate(PROMPTS, method="plain", soft_prompt=name, **SETTINGS, **sampling)
        got = engine.generate(PROMPTS, method=method, soft_prompt=name, **SETTINGS, **sampling)
        if not sampling:
            assert [r.token_ids for r in got] == [r.token_ids for r in want]
        one_by_one = engine.generate(PROMPTS, method=method, soft_prompt=name, batch_size=1, **SETTINGS, **sampling)
        if method != "auto":
            assert [r.token_ids for r in got] == [r.token_ids for r in one_by_one]
        none = engine.generate(PROMPTS, method=method, soft_prompt="none", **SETTINGS, **sampling)
        assert [r.token_ids for r in none] != [r.token_ids for r in got]


_MODELS: dict[str, Path] = {}


def test_kept_prompts_are_of_one_member(engine: Engine) -> None:
    """The same text behind another member is another text, for the prefix cache too."""
    text = " ".join(PROMPTS) * 3
    free = {n: engine.generate(text, method="plain", soft_prompt=n, **SETTINGS)[0] for n in ("one", "long", "none")}
    engine.prefix_cache = engine.new_prefix_cache(1 << 24)
    try:
        for _ in range(2):
            for name, want in free.items():
                [got] = engine.generate(text, method="plain", soft_prompt=name, **SETTINGS)
                assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs), name
        assert engine.prefix_cache.num_hits > 0
        longer = text + " and more of it"
        [got] = engine.generate(longer, method="lookup", soft_prompt="long", **SETTINGS)
        engine.prefix_cache = None
        [want] = engine.generate(longer, method="lookup", soft_prompt="long", **SETTINGS)
        assert got.token_ids == want.token_ids
    finally:
        engine.prefix_cache = None


def test_all_blocks_come_back(engine: Engine) -> None:
    """Requests leave nothing behind, and members stay as they are."""
    pool = engine.prompt_pool
    assert pool is not None
    before = engine.memory.taken_bytes
    scores = pool.scores(engine.tokenizer.encode_prompt("abc"))
    first = engine.generate(PROMPTS * 2, method="plain", batch_size=3, **SETTINGS)
    second = engine.generate(PROMPTS * 2, method="plain", batch_size=3, **SETTINGS)
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert engine.memory.taken_bytes == before
    assert pool.scores(engine.tokenizer.encode_prompt("abc")) == scores


@pytest.mark.parametrize("scoring", ["joint", "standalone"])
def test_scores_are_those_of_a_plain_softmax(engine: Engine, scoring: Any) -> None:
    """The definition written again, over whole attention matrices, from projections of the first layer."""
    pool, model = engine.prompt_pool, engine.model
    assert pool is not None
    tokens = engine.tokenizer.encode_prompt(PROMPTS[0])
    keys = [member.keys for member in pool.members.values()]
    found = scores_of(model, tokens, keys, scoring)
    step = Step.dense(1, len(tokens))
    with torch.inference_mode():
        q = model.layers[0].project(model.embed(torch.tensor(tokens), step), step).float()  # type: ignore[operator]
    own = step.memory.stored(0)[0][0].float()
    c, want = model.config, [0.0] * len(keys)
    for row in range(len(tokens)):
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            mine = own[group, : row + 1] @ q[row, head] * c.scale
            theirs = [key[group] @ q[row, head] * c.scale for key in keys]
            for place, one in enumerate(theirs):
                others = torch.cat([*theirs, mine]) if scoring == "joint" else torch.cat([one, mine])
                share = (one.exp().sum() / others.exp().sum()) / len(one)
                want[place] += float(share) / (c.num_heads * len(tokens))
    assert found == pytest.approx(want, rel=2e-3 if model.dtype == torch.bfloat16 else 1e-4)
    turned = scores_of(model, tokens, keys[::-1], scoring)
    assert turned[::-1] == pytest.approx(found, rel=1e-9), "the order of the members changes nothing"


def test_a_planted_signal_is_found_and_ties_go_to_the_first(base: Path) -> None:
    """Members that are embeddings of tokens win for texts of those tokens where heads look for their like."""
    engine = vivace.load(base, kernels="torch", dtype="float32")
    model = engine.model
    first = model.layers[0]
    with torch.no_grad():  # queries and keys become the same map, so that a token reads its like
        c = model.config
        q, k = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        weight = first.qkv.weight  # type: ignore[union-attr]
        weight.data = weight.data.clone()
        weight.data[:q] = 4 * weight.data[q : q + k].view(c.num_kv_heads, c.head_dim, -1).repeat_interleave(
            c.num_heads // c.num_kv_heads, 0
        ).flatten(0, 1)
    sets = {"low": [40, 41, 42, 43], "high": [200, 201, 202, 203]}
    rows = {name: model.embedding[torch.tensor(ids)].detach().float() for name, ids in sets.items()}
    pool = PromptPool(model, rows, engine.memory)
    for name, ids in sets.items():
        assert pool.choose(ids * 3).name == name
    same = PromptPool(model, {"a": rows["low"], "b": rows["low"]}, engine.memory)
    assert same.choose([1, 2, 3]).name == "a"
    assert len(set(same.scores([1, 2, 3]).values())) == 1


def test_files_are_those_of_peft_and_wrong_ones_are_refused(base: Path, tmp_path: Path) -> None:
    engine = vivace.load(base, dtype="float32")
    width, model, tokenizer = engine.model.config.width, engine.model, engine.tokenizer
    rows = drawn(width, {"a": 4})["a"]
    save_soft_prompt(tmp_path / "pool" / "a", rows, tokenizer, "tiny")
    save_soft_prompt(tmp_path / "pool" / "b", 2 * rows, tokenizer, "tiny")
    assert torch.equal(load_soft_prompt(tmp_path / "pool" / "a", width, tokenizer), rows)
    assert list(load_pool(tmp_path / "pool", model, tokenizer, engine.memory).members) == ["a", "b"]
    assert list(load_pool(tmp_path / "pool" / "b", model, tokenizer, engine.memory).members) == ["b"]
    with pytest.raises(NotFoundError, match="there is no pool"):
        load_pool(tmp_path / "none", model, tokenizer, engine.memory)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="holds no soft prompts"):
        load_pool(tmp_path / "empty", model, tokenizer, engine.memory)
    with pytest.raises(MismatchError, match=f"width {width}, and this one has 64"):
        load_soft_prompt(tmp_path / "pool" / "a", 64, tokenizer)
    other = vivace.load(make_checkpoint(tmp_path / "other", vocab_size=300)).tokenizer
    with pytest.raises(MismatchError, match="another tokenizer"):
        load_soft_prompt(tmp_path / "pool" / "a", width, other)
    save_soft_prompt(tmp_path / "nan", rows * torch.nan, tokenizer, None)
    with pytest.raises(CorruptError, match="not finite"):
        load_soft_prompt(tmp_path / "nan", width, tokenizer)
    loaded = vivace.load(base, dtype="float32", prompt_pool=tmp_path / "pool")
    with pytest.raises(ConfigError, match="did you mean"):
        loaded.generate("abc", soft_prompt="aa", max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="beams"):
        loaded.generate("abc", num_beams=2, max_new_tokens=2)
    with pytest.raises(CapacityError, match="behind a soft prompt of 4"):
        loaded.generate([5] * 500, max_new_tokens=10)
    with pytest.raises(ConfigError, match="there is no pool"):
        engine.generate("abc", soft_prompt="a", max_new_tokens=2)


def test_rows_are_judged_behind_the_soft_prompt_that_they_get(engine: Engine) -> None:
    pool = engine.prompt_pool
    assert pool is not None
    reader, tokenizer = LikelihoodReader(engine.model), engine.tokenizer
    question = question_of(tokenizer, PROMPTS[0], [" brown fox jumps", " the"])
    embeddings = drawn(engine.model.config.width, {"one": 5, "two": 20, "long": 70})
    for name, member in pool.members.items():
        found = reader.logits(question, member)
        for logits, option in zip(found, question.options, strict=True):
            tokens = [*question.context, *option[:-1]]
            wanted = logits_behind(engine, embeddings[name], tokens)[len(question.context) - 1 :].float()
            atol = 2e-4 if engine.model.dtype == torch.float32 else 0.5
            torch.testing.assert_close(logits, wanted, atol=atol, rtol=2e-4)
    plain = reader.logits(question)
    assert not torch.allclose(plain[0], reader.logits(question, pool.find("long"))[0], atol=0.1)


def test_a_row_s_soft_prompt_is_chosen_once_and_never_from_its_options(engine: Engine) -> None:
    pool = engine.prompt_pool
    assert pool is not None
    asked: list[list[int]] = []
    read = pool.choose
    pool.choose = lambda tokens: asked.append(list(tokens)) or read(tokens)  # type: ignore[func-returns-value, method-assign]
    try:
        rows = [
            TaskRow("a", ("one two",), (" x", " long option"), 0),
            TaskRow("b", ("bob met ann", "bob met tom"), (" today",), 1),
        ]
        found = judge([JudgedSystem("plain", engine, None, "none"), JudgedSystem("auto", engine)], rows)
    finally:
        del pool.choose
    assert asked == [engine.tokenizer.encode(text) for text in ("one two", "bob met ")]
    assert [one.nll_change.estimate == 0 for one in found if one.nll_change is not None] == [False, False]
    with pytest.raises(ConfigError, match="soft_prompt is 'tow'"):
        judge([JudgedSystem("a", engine, None, "tow")], rows)
