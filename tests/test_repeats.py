"""The count of repeated code finds stretches of six lines, once each, whatever stands between them that is no code."""

from __future__ import annotations

from tools.repeats import Repeat, lines_of, repeats

BODY = [f"    x{number} = {number}" for number in range(8)]


def found(*texts: str) -> list[Repeat]:
    return list(repeats({f"{place}.py": lines_of(text) for place, text in enumerate(texts)}))


def test_a_stretch_is_one_pair_however_long() -> None:
    one = "\n".join(["def one():", *BODY])
    other = "\n".join(["import os", "", "def other():", '    """Do the same."""', *BODY[:4], "    # and on", *BODY[4:]])
    assert found(one, other) == [Repeat(("0.py", 2), ("1.py", 5), 8)]


def test_five_lines_are_no_repetition() -> None:
    assert not found("\n".join(["def one():", *BODY[:5]]), "\n".join(["def other():", *BODY[:5]]))


def test_imports_do_not_count() -> None:
    text = "\n".join(f"import m{number}" for number in range(9))
    assert not found(text, text)


def test_a_stretch_does_not_repeat_itself_where_it_overlaps() -> None:
    same = ["    x = 1"] * 8
    assert not found("\n".join(["def one():", *same]))
    assert len(found("\n".join(["def one():", *BODY, "def other():", *BODY]))) == 1
