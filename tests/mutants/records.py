"""Bugs that are planted into a copy of the program, each with the tests that have to notice it.

To add one, append a ``Mutant``: a defect that somebody could write and that leaves the program running, the exact text
it replaces, and tests of the default run that fail because of it. Choose tests that take a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Change = Callable[[bytes], bytes]
"""A file's content -> what a defect makes of it."""


class OutOfDate(Exception):
    """A record no longer fits the file it names."""


@dataclass(frozen=True)
class Replaced:
    """A text that stands once in the file gives way to another."""

    old: str
    new: str

    def __call__(self, content: bytes) -> bytes:
        """See ``Change``; raises ``OutOfDate`` unless the text stands there exactly once."""
        count = content.count(self.old.encode())
        if count != 1:
            raise OutOfDate(f"this text stands there {count} times instead of once: {self.old!r}")
        return content.replace(self.old.encode(), self.new.encode())


def zeroed(content: bytes) -> bytes:
    """A safetensors file whose weights are all zero; eight bytes that say how long its header is come first."""
    start = 8 + int.from_bytes(content[:8], "little")
    return content[:start] + bytes(len(content) - start)


@dataclass(frozen=True)
class Mutant:
    """A defect and those who have to notice it."""

    name: str
    """What the program does wrong."""
    file: str
    """Where the defect is, from the root of the repository."""
    change: Change
    tests: tuple[str, ...]
    """Each of them fails: tests as pytest names them, all cases where no brackets say which."""


GUESSES = "tests/guesses/test_training_is_decoding.py"
SHIPPED = "src/vivace/weights/vivace-14m"

MUTANTS = (
    # what drafters compute
    Mutant(
        "EAGLE reads embedding and feature the wrong way round",
        "src/vivace/methods/eagle/drafter.py",
        Replaced("self._join(torch.cat((features, embedded), -1))", "self._join(torch.cat((embedded, features), -1))"),
        (f"{GUESSES}::test_on_pytorch[eagle chain-1]", f"{GUESSES}::test_behind_a_cached_prefix[eagle tree-begun]"),
    ),
    Mutant(
        "Medusa guesses from the first row of the kept path instead of its last",
        "src/vivace/methods/medusa/drafter.py",
        Replaced("[path[-1] for path in verdict.paths]", "[path[0] for path in verdict.paths]"),
        (f"{GUESSES}::test_on_pytorch[medusa tree-4]",),
    ),
    Mutant(
        "feedback comes from the first row of the kept path instead of its last",
        "src/vivace/decode/shallow.py",
        Replaced("[path[-1] for path in verdict.paths]", "[path[0] for path in verdict.paths]"),
        (f"{GUESSES}::test_on_pytorch[multirate knowing tree-4]",),
    ),
    Mutant(
        "prompt lookup copies from one token too late",
        "src/vivace/decode/lookup.py",
        Replaced("self.tokens[end : end + count]", "self.tokens[end + 1 : end + 1 + count]"),
        ("tests/decode/test_lookup.py::test_it_follows_a_growing_text",),
    ),
    # what they learn, and with what they ship
    Mutant(
        "the alignment loss pushes residuals away from where they are to arrive",
        "src/vivace/train/distillation.py",
        Replaced("(1 - F.cosine_similarity(", "(1 + F.cosine_similarity("),
        ("tests/objectives/test_objectives.py::test_the_loss_is_the_loop[multirate]",),
    ),
    Mutant(
        "the accelerator that ships is all zeros",
        f"{SHIPPED}/adapters/multirate/adapter_model.safetensors",
        zeroed,
        ("tests/benchmarks/test_guesses.py::test_a_pass_brings_as_many_tokens_as_ever[multirate]",),
    ),
    # verification and sampling
    Mutant(
        "a rejected guess is recovered from the whole distribution",
        "src/vivace/decode/verify.py",
        Replaced("rest = (distribution - probs[child]).clamp(min=0)", "rest = distribution.clamp(min=0)"),
        ("tests/decode/test_verify.py::test_the_law_of_the_text_is_the_targets[drawn-(1, 1)]",),
    ),
    Mutant(
        "top-p leaves out the token that reaches p",
        "src/vivace/core/sampling.py",
        Replaced("(before < top_p).sum()", "(ordered.cumsum(-1) < top_p).sum()"),
        ("tests/decode/test_distributions.py::test_the_law_is_transformers",),
    ),
    Mutant(
        "logits processors do not see the drafted tokens before their own",
        "src/vivace/decode/distributions.py",
        Replaced("[tokens[r] for r in draft.path(row)]", "[tokens[row]]"),
        (
            "tests/decode/test_distributions.py::test_a_row_is_judged_on_its_own_path",
            "tests/decode/test_stopping.py::test_penalties_are_applied_at_every_drafted_place",
        ),
    ),
    Mutant(
        "the token after several drawn steps takes the noise of another position",
        "src/vivace/decode/checked.py",
        Replaced("context.cache.lengths[slot] + rows)", "context.cache.lengths[slot] + rows + 1)"),
        ("tests/decode/test_sampled_text.py::test_native_texts_of_a_seed_are_plain_decodings",),
    ),
    Mutant(
        "guesses of drawn texts are perturbed with the noise of the position before",
        "src/vivace/kernels/native/chain.h",
        Replaced("chain_.length[sequence] + depth + 1;", "chain_.length[sequence] + depth;"),
        ("tests/decode/test_sampled_text.py::test_native_drafts_share_the_noise_of_verification",),
    ),
    # kernels and cache
    Mutant(
        "native attention forgets to rescale its sum of weights from the second block of entries on",
        "src/vivace/kernels/native/attention.h",
        Replaced("*total = *total * keep + sum_of(sum);", "*total = *total + sum_of(sum);"),
        ("tests/kernels/test_native.py::test_attention[avx2]",),
    ),
    Mutant(
        "values of a branch that is kept stay behind at its siblings'",
        "src/vivace/core/cache.py",
        Replaced(
            "for stored in self.store.stored(layer):\n                stored.index_copy_(1, places",
            "for stored in self.store.stored(layer)[:1]:\n                stored.index_copy_(1, places",
        ),
        (
            "tests/core/test_cache.py::test_against_lists",
            "tests/decode/test_cache_contents.py::test_the_cache_is_that_of_a_prefill",
        ),
    ),
    # server
    Mutant(
        "prompts are shared by requests of different API keys",
        "src/vivace/decode/prefix.py",
        Replaced("return Root(owner, salt,", 'return Root(b"", salt,'),
        ("tests/decode/test_prefix.py::test_whatever_is_asked_only_its_own_entries_come_back",),
    ),
    Mutant(
        "a pass that is made again goes on with random numbers that the failed one has used",
        "src/vivace/decode/isolation.py",
        Replaced("generator.set_state(numbers)", "generator.get_state()"),
        ("tests/decode/test_isolation.py::test_a_pass_that_fails_once_changes_nothing",),
    ),
    Mutant(
        "an answer goes on as free text where it left its grammar",
        "src/vivace/serve/grammar.py",
        Replaced('raise _stopped(self._param, "the text does not fit the schema")', "return False"),
        ("tests/serve/test_bound.py::test_decided_tokens_that_do_not_fit_are_an_error",),
    ),
    # storage and measuring
    Mutant(
        "pages that are read from a store are not compared with their checksums",
        "src/vivace/storage/io/checksums.py",
        Replaced("self.pages.compare(offset, into)", "self.pages.address"),
        ("tests/storage/io/test_checksums.py::test_every_page_is_compared",),
    ),
    Mutant(
        "the bench lets transformers run in its slower dtype",
        "src/vivace/evaluate/peers.py",
        Replaced("best = max(rates,", "best = min(rates,"),
        ("tests/evaluate/test_heat.py::test_the_faster_dtype_runs",),
    ),
)
