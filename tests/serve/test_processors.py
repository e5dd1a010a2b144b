"""What bends a law, and what a request becomes."""

from __future__ import annotations

import json

import pytest
import torch

from vivace.engine import Engine
from vivace.serve.api_error import APIError
from vivace.serve.catalog import Catalog
from vivace.serve.grammar import Bound
from vivace.serve.grammars import Grammars
from vivace.serve.processors import LogitBias, Penalties

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_penalties_look_at_the_answer_alone() -> None:
    ids = torch.tensor([[5, 5, 7, 7, 8]])
    found = Penalties(2, presence=1.0, frequency=0.5)(ids, torch.zeros(1, 10))
    assert found.tolist()[0] == [0, 0, 0, 0, 0, 0, 0, -2.0, -1.5, 0]


def test_bias_is_added() -> None:
    assert LogitBias({3: 2.5, 0: -1.0})(torch.tensor([[1]]), torch.ones(1, 5)).tolist()[0] == [0, 1, 1, 3.5, 1]


def allowed(processor: object, ids: list[int], vocab: int) -> frozenset[int]:
    logits = processor(torch.tensor([ids]), torch.zeros(1, vocab))  # type: ignore[operator]
    return frozenset((logits[0] == 0).nonzero()[:, 0].tolist())


def test_a_grammar_may_be_asked_in_any_order(engine: Engine) -> None:
    vocab = engine.model.config.vocab_size
    grammars = Grammars(engine.tokenizer, vocab)
    prompt = engine.tokenizer.encode("a prompt")
    paths = [engine.tokenizer.encode(json.dumps({"a": value})) for value in ("x", "yy")]
    prefixes = [path[:stop] for path in paths for stop in range(len(path) + 1)]
    grammar = grammars.json_schema(SCHEMA, b"")
    fresh = [allowed(Bound(grammar, len(prompt)), [*prompt, *prefix], vocab) for prefix in prefixes]
    one = Bound(grammar, len(prompt))
    for order in (range(len(prefixes)), reversed(range(len(prefixes))), (3, 0, len(prefixes) - 1, 2)):
        for place in order:
            assert allowed(one, [*prompt, *prefixes[place]], vocab) == fresh[place]
    assert fresh[len(paths[0])] == frozenset(engine.tokenizer.eos_ids), "a whole answer can only end"


def test_what_cannot_follow_leaves_the_matcher_where_it_can_go_on(engine: Engine) -> None:
    vocab = engine.model.config.vocab_size
    one = Bound(Grammars(engine.tokenizer, vocab).json_schema(SCHEMA, b""), 0)
    path = engine.tokenizer.encode('{"a": "x"}')
    before = allowed(one, path[:2], vocab)
    wrong = next(token for token in range(vocab) if token not in before)
    assert len(allowed(one, [*path[:2], wrong, 5], vocab)) == vocab, "no law is needed above an impossible guess"
    assert allowed(one, path[:2], vocab) == before
    assert allowed(one, path, vocab) == frozenset(engine.tokenizer.eos_ids)


def test_the_method_of_a_request(engine: Engine) -> None:
    catalog = Catalog(engine, "base", "auto", {})
    assert catalog.method("base", None) == "auto"
    assert catalog.method("base", "multirate") == "multirate"
    with pytest.raises(APIError, match="draft"):
        catalog.method("base", "draft")


def test_an_adapter_is_used_though_the_server_decodes_plainly(engine: Engine, folder: object) -> None:
    catalog = Catalog(engine, "base", "plain", {"fast": f"{folder}/beta"})
    assert catalog.method("base", None) == "plain"
    assert catalog.method("fast", None) == "multirate"
    assert catalog.drafter("fast", "multirate", None) is not catalog.drafter("base", "multirate", None)
