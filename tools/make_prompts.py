"""Make the prompt sets that come with the package: ``python tools/make_prompts.py``.

*e2e*: meaning representations from lists of attributes and values in the format of the E2E challenge. *sql*: questions
over invented tables in the style of WikiSQL, each with the query that answers it. The random numbers are seeded,
so running this again changes nothing (a test checks that).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from vivace.evaluate.tasks import describe_prompt, sql_prompt
from vivace.prompts import Prompt, save_prompts

NUM_PROMPTS = 100
FOLDER = Path(__file__).resolve().parents[1] / "src" / "vivace" / "prompts"

NAMES = (
    "The Vaults", "Strada", "The Plough", "Giraffe", "Zizzi", "Loch Fyne", "The Waterman", "Blue Spice", "Green Man",
    "The Rice Boat", "The Olive Grove", "The Twenty Two", "Wildwood", "Cocum", "The Golden Curry", "Alimentum",
    "The Dumpling Tree", "Clowns", "The Mill", "Cotto", "The Punter", "The Eagle", "Aromi", "The Phoenix",
)  # fmt: skip
# Attributes in the order in which they are written, with the probability and the possible values of each.
ATTRIBUTES: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("eatType", 0.8, ("coffee shop", "pub", "restaurant")),
    ("food", 0.8, ("Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese")),
    ("priceRange", 0.7, ("cheap", "moderate", "high", "less than £20", "£20-25", "more than £30")),
    ("customer rating", 0.7, ("low", "average", "high", "1 out of 5", "3 out of 5", "5 out of 5")),
    ("area", 0.6, ("riverside", "city centre")),
    ("familyFriendly", 0.6, ("yes", "no")),
    ("near", 0.5, ("Café Rouge", "Burger King", "The Portland Arms", "Crowne Plaza Hotel", "Raja Indian Cuisine",
                   "Yippee Noodle Bar", "All Bar One", "The Six Bells", "Clare Hall", "The Bakers")),
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    """Name in SQL."""
    words: str
    """Name in a question."""
    values: tuple[int | str, ...]
    """Values, either all numbers or all text."""

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers, which a condition may compare by size."""
        return isinstance(self.values[0], int)


TABLES: tuple[tuple[Column, ...], ...] = (
    (
        Column("BRIDGE", "bridge", ("Miller's Crossing", "Old Ferry Bridge", "Alder Viaduct", "North Weir Bridge")),
        Column("RIVER", "river", ("Tarn", "Ouse Brook", "Lindle", "Grey Water")),
        Column("LENGTH_(M)", "length", (84, 212, 415, 1130)),
        Column("YEAR_OPENED", "year opened", (1887, 1931, 1964, 2008)),
        Column("ENGINEER", "engineer", ("Ada Brandt", "Tomas Reyl", "Ines Okafor")),
    ),
    (
        Column("TEAM", "team", ("Harbour Lions", "Redfield United", "Kestrel Park", "Eastgate Rovers")),
        Column("COACH", "coach", ("Maria Dunmore", "Pavel Horak", "Samir Bello")),
        Column("WINS", "number of wins", (3, 9, 14, 21)),
        Column("LOSSES", "number of losses", (2, 6, 11)),
        Column("STADIUM", "stadium", ("Lantern Field", "Mason Road", "Quayside Arena")),
    ),
    (
        Column("EPISODE", "episode", ("The Glass Key", "A Winter Tide", "Nine Lanterns", "Paper Boats")),
        Column("SEASON", "season", (1, 2, 4, 6)),
        Column("DIRECTED_BY", "director", ("Lena Marsh", "Oskar Vane", "Priya Nandan")),
        Column("WRITTEN_BY", "writer", ("Colm Adair", "Juno Park", "Theo Lind")),
        Column("VIEWERS_(MILLIONS)", "number of viewers", (4, 7, 12)),
    ),
    (
        Column("DRIVER", "driver", ("Nils Aker", "Rosa Vidal", "Jack Tennant", "Emi Sato")),
        Column("CONSTRUCTOR", "constructor", ("Corvus", "Altair Racing", "Vento")),
        Column("LAPS", "number of laps", (18, 44, 57, 70)),
        Column("GRID", "grid", (1, 5, 12, 19)),
        Column("TIME/RETIRED", "time/retired", ("gearbox", "+ 1 lap", "engine failure")),
    ),
    (
        Column("STATION", "station", ("Birch Lane", "Upper Dell", "St Anselm", "Canal Street")),
        Column("LINE", "line", ("Copper", "Orchard", "Silver Loop")),
        Column("PLATFORMS", "number of platforms", (2, 3, 6)),
        Column("OPENED", "opening date", ("4 May 1902", "17 October 1956", "29 March 1999")),
        Column("PASSENGERS", "number of passengers", (1200, 8400, 23000)),
    ),
    (
        Column("PEAK", "peak", ("Mount Harrow", "Silver Tooth", "Cloud Table", "Old Man's Seat")),
        Column("COUNTRY", "country", ("Norlund", "Estavia", "Pell")),
        Column("ELEVATION_(M)", "elevation", (1840, 2975, 4102, 5066)),
        Column("FIRST_ASCENT", "first ascent", (1874, 1909, 1953)),
    ),
    (
        Column("SHIP", "ship", ("Grey Heron", "Maid of Pell", "North Star", "Perseverance")),
        Column("BUILDER", "builder", ("Dunmore Yard", "Halvorsen & Sons", "Tarn Docks")),
        Column("TONNAGE", "tonnage", (640, 1875, 5200)),
        Column("LAUNCHED", "launch date", ("2 June 1898", "11 August 1921", "30 January 1938")),
        Column("FATE", "fate", ("scrapped", "museum ship", "lost at sea")),
    ),
    (
        Column("SONG", "song", ("Copper Moon", "Slow Train Home", "Marigold", "Seven Doors")),
        Column("ARTIST", "artist", ("The Alder Street Band", "Noor Halim", "Tin Whistle Club")),
        Column("PLACE", "place", (1, 2, 5, 8)),
        Column("POINTS", "number of points", (41, 96, 153)),
        Column("LANGUAGE", "language", ("English", "Estavian", "French")),
    ),
)  # fmt: skip
AGGREGATES = {"MAX": "highest", "MIN": "lowest", "AVG": "average", "SUM": "total"}


def draw_e2e(rng: random.Random) -> Prompt:
    """Return a meaning representation of a name and at least two attributes."""
    chosen: list[str] = []
    while len(chosen) < 2:
        chosen = [f"{name}[{rng.choice(values)}]" for name, share, values in ATTRIBUTES if rng.random() < share]
    return Prompt(describe_prompt(", ".join([f"name[{rng.choice(NAMES)}]", *chosen])), task="e2e")


def draw_sql(rng: random.Random) -> Prompt:
    """Return a question with one or two conditions, and its query."""
    table = rng.choice(TABLES)
    wanted, *given = rng.sample(table, rng.choice((2, 2, 3)))
    aggregate, ask = _ask(rng, wanted)
    asked, tested = zip(*(_condition(rng, column) for column in given), strict=True)
    question = f"{ask} {' and '.join(asked)}?"
    select = f"{aggregate} {wanted.name}" if aggregate else wanted.name
    query = f"SELECT {select} FROM TABLE WHERE {' AND '.join(tested)} ;"
    columns = rng.sample(table, len(table))
    return Prompt(sql_prompt(question, (column.name for column in columns)), (query,), "wikisql")


def _ask(rng: random.Random, wanted: Column) -> tuple[str, str]:
    """Return an aggregate, or none, and the beginning of a question for it."""
    if wanted.is_number and rng.random() < 0.5:
        aggregate = rng.choice(sorted(AGGREGATES))
        return aggregate, f"What is the {AGGREGATES[aggregate]} {wanted.words} with"
    if not wanted.is_number and rng.random() < 0.2:
        return "COUNT", f"How many {wanted.words} entries have"
    return "", rng.choice(
        (f"What is the {wanted.words} with", f"Which {wanted.words} has", f"Name the {wanted.words} for")
    )


def _condition(rng: random.Random, column: Column) -> tuple[str, str]:
    """Return a condition in words and in SQL; text of several words is quoted, as in WikiSQL."""
    value = rng.choice(column.values)
    article = "an" if column.words[0] in "aeiou" else "a"
    if column.is_number:
        sign, words = rng.choice((("=", "of"), ("=", "of"), (">", "larger than"), ("<", "smaller than")))
        return f"{article} {column.words} {words} {value}", f"{column.name} {sign} {value}"
    literal = f'"{value}"' if " " in str(value) else str(value)
    return f"{article} {column.words} of {value}", f"{column.name} = {literal}"


def main() -> None:
    """Make both sets of distinct prompts."""
    for name, draw in (("e2e", draw_e2e), ("sql", draw_sql)):
        rng = random.Random(name)
        drawn: dict[str, Prompt] = {}
        while len(drawn) < NUM_PROMPTS:
            prompt = draw(rng)
            drawn.setdefault(str(prompt.request), prompt)
        save_prompts(FOLDER / f"{name}.jsonl", drawn.values())
        print(f"{FOLDER / name}.jsonl: {len(drawn)} prompts")


if __name__ == "__main__":
    main()
