from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.evaluate.spacing import detokenise, is_tokenised

PAIRS = [
    ("Fen House is a pub .", "Fen House is a pub."),
    ("Cheap , quiet , family - friendly .", "Cheap, quiet, family-friendly."),
    ("name[Fen House], priceRange[more than £ 30]", "name[Fen House], priceRange[more than £30]"),
    ("name[Fen House], priceRange[£ 20 - 25], area[riverside]", "name[Fen House], priceRange[£20-25], area[riverside]"),
    ("between £ 20- £ 25", "between £20-£25"),
    ("for 20 -25 a head", "for 20-25 a head"),
    ("It 's near , but they don 't allow children .", "It's near, but they don't allow children."),
    ("non - family - friendly", "non-family-friendly"),
    ("a 5 - star place", "a 5-star place"),
    ("Fen House - a pub - is dear .", "Fen House - a pub - is dear."),
    ("Fen House- a pub", "Fen House - a pub"),
    ("you can dine - in or eat - in", "you can dine-in or eat-in"),
    ("Called ' The Fen ' , near ' Oak '.", "Called 'The Fen', near 'Oak'."),
    ("Called 'The Fen ' .", "Called 'The Fen'."),
    ("The Fens ' food is good", "The Fens' food is good"),
    ("It serves food .Prices are high .", "It serves food. Prices are high."),
    ("Price range : high ; it is good !", "Price range: high; it is good!"),
    ("St. John 's", "St. John's"),
    ("rated 3.5 out of 5 .", "rated 3.5 out of 5."),
]


@pytest.mark.parametrize(("tokenised", "written"), PAIRS)
def test_spaces_go_where_people_put_them(tokenised: str, written: str) -> None:
    assert detokenise(tokenised) == written


@pytest.mark.parametrize("written", [pair[1] for pair in PAIRS])
def test_text_as_written_stays(written: str) -> None:
    assert detokenise(written) == written


@given(st.text(alphabet="ab s'\"-.,£20é", max_size=40))
def test_only_spaces_change(text: str) -> None:
    assert detokenise(text).replace(" ", "") == text.replace(" ", "")


def test_tokenised_files_are_told_from_written_ones() -> None:
    assert is_tokenised(["A pub .", "Cheap , near .", "no marks"])
    assert not is_tokenised(["A pub.", "Cheap, near.", "a slip ."])
    assert not is_tokenised([])
