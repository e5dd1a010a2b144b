from __future__ import annotations

import pytest

from vivace.evaluate.slots import PHRASES, SlotErrors, parse_slots, slot_errors, total_slot_errors

FULL = (
    "Describe: name[The Fen House], eatType[coffee shop], food[Italian], priceRange[less than £20], "
    "customer rating[1 out of 5], area[riverside], familyFriendly[no], near[Café Oak]"
)


def test_a_representation_is_taken_apart() -> None:
    assert parse_slots(FULL) == {
        "name": "The Fen House",
        "eatType": "coffee shop",
        "food": "Italian",
        "priceRange": "less than £20",
        "customer rating": "1 out of 5",
        "area": "riverside",
        "familyFriendly": "no",
        "near": "Café Oak",
    }
    assert list(parse_slots(FULL))[1:7] == list(PHRASES)


@pytest.mark.parametrize(
    "text",
    [
        "The Fen House is a low rated Italian coffee shop by the river near Café Oak. Prices under £20. Not for kids.",
        "Near Café Oak on the riverside, Fen House is a cheap, adults-only coffee shop with pasta and a 1-star rating.",
        "Fen House, a coffee shop near café oak, isn't family-friendly: Italian food, poor reviews, low prices, river.",
    ],
)
def test_paraphrases_are_right(text: str) -> None:
    assert slot_errors(FULL, text) == SlotErrors(num_slots=8)


@pytest.mark.parametrize(
    ("mr", "text", "expected"),
    [
        ("name[Oak], food[French]", "Oak serves French food.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], food[French]", "Oak serves food.", SlotErrors(2, 0, 1, 0)),
        ("name[Oak], food[French]", "Oak serves Chinese food.", SlotErrors(2, 1, 0, 0)),
        ("name[Oak], food[French]", "Elm serves French food.", SlotErrors(2, 0, 1, 0)),
        ("name[Oak], food[French]", "Oak serves French food by the river.", SlotErrors(2, 0, 0, 1)),
        ("name[Oak], area[city centre]", "Oak is in the center of the city.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], familyFriendly[yes]", "Oak is child friendly.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], familyFriendly[yes]", "Oak is not child friendly.", SlotErrors(2, 1, 0, 0)),
        ("name[Oak], familyFriendly[no]", "Oak is a no-kids place.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], familyFriendly[no]", "Oak is family friendly.", SlotErrors(2, 1, 0, 0)),
        ("name[Oak], priceRange[£20-25]", "Oak costs 20 - £25.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], priceRange[£ 20 - 25]", "Oak is moderately priced.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], priceRange[high]", "Oak is highly priced.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], priceRange[high]", "Oak is inexpensive.", SlotErrors(2, 1, 0, 0)),
        ("name[Oak], priceRange[high]", "Oak is highly rated.", SlotErrors(2, 0, 1, 1)),
        ("name[Oak], customer rating[high]", "Oak is rated highly.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], customer rating[3 out of 5]", "Oak has a low customer rating.", SlotErrors(2, 1, 0, 0)),
        ("name[Oak], customer rating[average]", "Oak has three stars.", SlotErrors(2, 0, 0, 0)),
        ("name[Golden Curry], food[French]", "Golden Curry is here.", SlotErrors(2, 0, 1, 0)),
        ("name[Oak], near[The Burger Inn]", "Oak is near Burger Inn.", SlotErrors(2, 0, 0, 0)),
        ("name[Oak], near[Oak Bar], food[French]", "Oak, French, is near Oak Bar.", SlotErrors(3, 0, 0, 0)),
        ("name[Oak Bar], near[Oak], food[French]", "Oak Bar, French, is near Oak.", SlotErrors(3, 0, 0, 0)),
        ("name[Oak], near[Oak Bar], food[French]", "A French place near Oak Bar.", SlotErrors(3, 0, 1, 0)),
        ("name[], area[riverside]", "It lies at the riverside.", SlotErrors(1, 0, 0, 0)),
    ],
)
def test_each_slot_is_right_wrong_missing_or_added(mr: str, text: str, expected: SlotErrors) -> None:
    assert slot_errors(mr, text) == expected


def test_rates_are_over_slots() -> None:
    total = total_slot_errors(["name[Oak], food[French]"] * 2, ["Oak, French.", "A Chinese place."])
    assert total == SlotErrors(4, 1, 1, 0)
    assert total.rate == 0.5
    assert SlotErrors().rate == 0.0
