"""Parts of a step: each is measured, the host's work is what is left of a session, and nothing stays behind."""

from __future__ import annotations

import time

import pytest

from benchmarks.step_parts import Watched, host_seconds, measure_parts
from vivace import load
from vivace.core.seams import Context, Draft
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.engine import Engine
from vivace.errors import ConfigError

PASS_S, HOST_S = 0.05, 0.01


class Slow(NoDrafts):
    """Drafts and forgets at a known pace."""

    def propose(self, context: Context) -> Draft:
        """Nothing, late."""
        time.sleep(PASS_S)
        return super().propose(context)

    def commit(self, slots: object, paths: object) -> None:
        """Nothing, late."""
        time.sleep(HOST_S)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The model that ships."""
    return load(None)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_parts_are_measured(kernels: str) -> None:
    engine = load(None, kernels=kernels)
    plain, drafter = engine.methods.drafter("plain"), engine.methods.drafter("multirate", 2)
    parts = measure_parts(engine.model, plain, drafter, [5, 6, 7, 8], longest=2, repeats=1)
    assert min(parts.plain_s, *parts.draft_s, *parts.verify_s) > 0
    assert (len(parts.draft_s), len(parts.verify_s)) == (2, 2)
    with pytest.raises(ConfigError, match="found 1 tokens"):
        measure_parts(engine.model, plain, drafter, [5], longest=2)


def test_the_hosts_work_is_what_is_no_pass(engine: Engine) -> None:
    host_s = host_seconds(engine.model, [Request((5, 6, 7), 6, Slow())], repeats=1)
    assert HOST_S <= host_s < PASS_S
    with pytest.raises(ConfigError, match="1 requests were answered in their first blocks"):
        host_seconds(engine.model, [Request((5, 6, 7), 1, NoDrafts())], repeats=1)


def test_steps_made_in_one_call_are_passes(engine: Engine) -> None:
    drafter = engine.methods.drafter("multirate")
    watched = Watched(drafter)
    texts = []
    for each in (drafter, watched):
        session = Session(engine.model, num_slots=1, capacity=40)
        session.admit(Request((5, 6, 7), 24, each))
        blocks = list(session.drain())
        texts.append([token for block in blocks for token in block.tokens])
    assert texts[0] == texts[1]
    assert 0 < watched.passes_s < blocks[-1].stats.draft_s + blocks[-1].stats.verify_s
