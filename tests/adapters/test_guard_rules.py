"""Rules find what they name in any division of the text, hold back what may become it, and hang on nothing."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vivace.adapters.guard import rules
from vivace.adapters.guard.guard import read_rules
from vivace.adapters.guard.numbers import is_card, is_iban
from vivace.adapters.guard.rules import SEARCH_S, TEXT_S, Rule, RuleSearch
from vivace.errors import ConfigError, CorruptError, UnsupportedError

EMAIL, CARD, IBAN = (Rule(kind, kind) for kind in ("email", "card", "iban"))  # type: ignore[arg-type]
WORDS = Rule("words", "words", words=("secret", "top  Shelf code"))
FOUND = [
    (EMAIL, "write to john.doe+x@mail.example.co.uk, or not", "john.doe+x@mail.example.co.uk"),
    (EMAIL, "(ann@example.org)", "ann@example.org"),
    (EMAIL, "write to _ann@example.org_ soon", "ann@example.org"),
    (EMAIL, "\u8bf7\u8054\u7cfbann@example.org\u8054\u7cfb", "ann@example.org"),
    (EMAIL, "so ...ann@example.org, then", "ann@example.org"),
    (CARD, "pay 4111  1111  1111  1111 now", "4111  1111  1111  1111"),
    (CARD, "pay 4111\u00a01111\u00a01111\u00a01111.", "4111\u00a01111\u00a01111\u00a01111"),
    (CARD, "pay 4111 1111 1111 1111 12/27 now", "4111 1111 1111 1111"),
    (CARD, "5555-5555-5555-4444.", "5555-5555-5555-4444"),
    (CARD, "it is 378282246310005", "378282246310005"),
    (IBAN, "to DE89 3704 0044 0532 0130 00 please, and soon", "DE89 3704 0044 0532 0130 00"),
    (IBAN, "GB82WEST12345698765432", "GB82WEST12345698765432"),
    (WORDS, "my secretary has a SECRET.", "SECRET"),
    (WORDS, "the top\nshelf  code", "top\nshelf  code"),
]
CLEAN = [
    (EMAIL, "an @ sign, a name@host and user@.com"),
    (CARD, "4111 1111 1111 1112, 0000 0000 0000 0000 and 12345678901234567890123"),
    (IBAN, "DE89 3704 0044 0532 0130 01, AB12 and xyDE89370400440532013000"),
    (WORDS, "secretary, secrets, topshelf code"),
]


def read_in_pieces(rule: Rule, text: str, cuts: list[int]) -> tuple[int | None, int]:
    """Return where the rule was found, and how many characters had been shown by then."""
    search, shown = RuleSearch(rule), 0
    for stop in cuts:
        found = search.look(text[:stop])
        if found.is_certain:
            return found.start, shown
        assert found.start >= shown, "what was shown is never taken back"
        shown = found.start
    found = search.look(text, is_whole=True)
    return (found.start if found.is_certain else None), shown


@pytest.mark.parametrize(("rule", "text", "what"), FOUND, ids=[text for _, text, _ in FOUND])
def test_found_in_any_division_and_no_character_of_it_was_shown(rule: Rule, text: str, what: str) -> None:
    start = text.index(what)
    one_by_one = list(range(1, len(text) + 1))
    divisions = [one_by_one, [], *(sorted(random.Random(seed).sample(one_by_one, 5)) for seed in range(8))]
    for cuts in divisions:
        found, shown = read_in_pieces(rule, text, cuts)
        assert found is not None, cuts
        assert found <= start < found + 12, (found, start)
        assert shown <= found


@pytest.mark.parametrize(("rule", "text"), CLEAN, ids=[text for _, text in CLEAN])
def test_what_is_none_is_not_found(rule: Rule, text: str) -> None:
    for cuts in (list(range(1, len(text) + 1)), []):
        assert read_in_pieces(rule, text, cuts)[0] is None
    assert RuleSearch(rule).look(text + " and so on, and on").start > len(text), "and is not held back for ever"


@pytest.mark.parametrize(
    ("rule", "text", "what"),
    [
        (IBAN, "order AB12 to account DE89370400440532013000 please", "DE89370400440532013000"),
        (IBAN, "flight LH44 paid from DE89 3704 0044 0532 0130 00.", "DE89 3704 0044 0532 0130 00"),
        (CARD, f"{'12345678 ' * 7}4111 1111 1111 1111 x", "4111 1111 1111 1111"),
        (CARD, f"{'7 ' * 60}4111-1111-1111-1111", "4111-1111-1111-1111"),
    ],
)
def test_a_number_behind_what_only_looks_like_one(rule: Rule, text: str, what: str) -> None:
    one_by_one = list(range(1, len(text) + 1))
    for cuts in (one_by_one, [], *(sorted(random.Random(seed).sample(one_by_one, 5)) for seed in range(8))):
        found, shown = read_in_pieces(rule, text, cuts)
        assert found is not None, cuts
        assert shown <= found <= text.index(what)


def test_a_long_run_of_digits_is_not_held_back() -> None:
    search, text = RuleSearch(CARD), ""
    for _ in range(60):
        text += "7777777 "
        assert search.look(text).start > len(text) - 60


def test_check_digits() -> None:
    assert is_card("4111 1111 1111 1111")
    assert is_iban("FR14 2004 1010 0505 0001 3M02 606")
    for place in range(16):  # Luhn notices every single wrong digit
        digits = list("4111111111111111")
        digits[place] = str((int(digits[place]) + 1) % 10)
        assert not is_card("".join(digits))
    digits = list("GB82WEST12345698765432")
    for place in range(8, 22):
        wrong = [*digits[:place], str((int(digits[place]) + 1) % 10), *digits[place + 1 :]]
        assert not is_iban("".join(wrong))


def test_a_pattern_that_explodes_is_an_error_and_hangs_nothing() -> None:
    rule = Rule("bomb", pattern=r"(?:(?:a|a)+b?)+c(?<=x)")
    begun = time.perf_counter()
    with pytest.raises(UnsupportedError, match="rule 'bomb' takes too long on this text"):
        RuleSearch(rule).look("a" * 60 + "!")
    assert time.perf_counter() - begun < 20 * SEARCH_S


def test_what_other_threads_compute_ends_no_search() -> None:
    """The package's own limit counts the time of all threads."""
    rule = Rule("words", "words", words=tuple(f"word{number:04}x" for number in range(1200)))
    text, stop = "word " * 6000, threading.Event()

    def busy() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()

    threads = [threading.Thread(target=busy) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        assert not RuleSearch(rule).look(text, is_whole=True).is_certain
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_checks_of_digits_count_as_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: str) -> bool:
        begun = time.thread_time()
        while time.thread_time() - begun < TEXT_S / 3:
            pass
        return False

    monkeypatch.setattr(rules, "is_card", slow)
    with pytest.raises(UnsupportedError, match="takes too long on this text"):
        RuleSearch(CARD).look("4111 1111 1111 1112, " * 9, is_whole=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"category": "", "kind": "email"}, "a rule's category is a name"),
        ({"category": "a", "kind": "emial"}, "kind must be one of email, card"),
        ({"category": "a", "pattern": "("}, "the pattern cannot be read"),
        ({"category": "a", "pattern": "x*"}, "finds the empty text everywhere"),
        ({"category": "a", "kind": "words"}, "needs words"),
        ({"category": "a", "kind": "email", "pattern": "x"}, "takes no pattern"),
        ({"category": "a", "kind": "words", "words": [" "]}, "a word must not be empty"),
        ({"category": "a", "patern": "x"}, "did you mean 'pattern'"),
        ({"category": "a", "pattern": "x" * 20_001}, "20000 at most"),
        ("x", "expected an object"),
    ],
)
def test_a_rule_that_is_wrong_is_named(tmp_path: Path, values: Any, message: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rules": [{"category": "fine", "kind": "card"}, values]}))
    with pytest.raises(ConfigError, match="rule 2") as caught:
        read_rules(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "error"), [("{", CorruptError), ("{}", ConfigError), ('{"rules": []}', ConfigError)])
def test_a_file_that_holds_no_rules(tmp_path: Path, text: str, error: type[Exception]) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(error, match=r"rules\.json"):
        read_rules(path)
