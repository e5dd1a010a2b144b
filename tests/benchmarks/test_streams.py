"""Ablations of speculative streams: each variant is a recipe that is read; a report gives one table and one picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks import streams
from vivace.configuration import build
from vivace.methods.multistream.config import MultistreamConfig
from vivace.recipes.multistream import MultistreamRecipe
from vivace.recipes.reading import override, read_recipe

CONFIG = MultistreamConfig(streams=3, feedback=True)


def test_every_variant_is_a_recipe_of_its_own() -> None:
    base = read_recipe("multistream")
    recipes = [
        build(MultistreamRecipe, override(base, [*streams.COMMON, *changes])) for changes in streams.VARIANTS.values()
    ]
    assert all(one != other for place, one in enumerate(recipes) for other in recipes[:place])


def test_drafts_have_every_depth_and_every_width_twice() -> None:
    found = streams.plans(CONFIG, 0.05)
    assert [plan.widths for plan in found[:3]] == [(1,), (1, 1), (1, 1, 1)]
    assert {plan.widths[0] for plan in found if plan.threshold == 0.05} == set(streams.WIDTHS)
    assert len({plan.label for plan in found}) == len(found)
    for plan in found:
        plan.check_fits(CONFIG)


def test_a_report_makes_the_same_table_and_picture_each_time(tmp_path: Path) -> None:
    wide = [streams.widths(CONFIG, threshold) for threshold in (0.0, 0.05)]
    names = list(dict.fromkeys(plan.label for row in wide for plan in row))

    def run(name: str) -> dict[str, object]:
        return {
            **{"method": name, "speedup": 1.5, "speedup_interval": (1.4, 1.6), "tokens_per_target_pass": 2.5},
            **{"acceptance_per_position": (0.9, 0.8), "identical": True},
        }

    report = {
        "paper_weights": 20,
        "medusa_weights": 17400,
        "weights": {"all parts": 1234},
        "variants": [run("plain"), run("all parts")],
        "drafts": [run("plain"), *map(run, names)],
        "widths": [[plan.label for plan in row] for row in wide],
    }
    table = streams.table(report)
    assert "| all parts | 1,234 | 2.50 | 0.90, 0.80 | 1.50x (1.40 to 1.60) | same |" in table
    assert "870 times" in table
    for name in ("a.svg", "b.svg"):
        streams.draw(report, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "pruned" in (tmp_path / "a.svg").read_text()
