"""What every table has to say of its figures, and what may not go into one."""

from __future__ import annotations

from benchmarks import captions

MACHINE = {"cpu": "A CPU", "num_threads": 2, "commit": "abc"}


def test_a_tree_with_changes_is_marked() -> None:
    assert captions.is_clean(MACHINE)
    assert captions.tree(MACHINE) == "commit abc"
    changed = MACHINE | {"commit": "abc+changes"}
    assert not captions.is_clean(changed)
    assert captions.tree(changed) == "**from a tree with uncommitted changes** on top of commit abc"
    assert not captions.is_clean(MACHINE | {"commit": None})


def test_slower_kernels_than_the_processors_best_are_named_as_such() -> None:
    able = MACHINE | {"best_kernels": "avx512"}
    assert captions.kernels(able, "avx512") == "kernels avx512"
    assert captions.kernels(able, "avx2") == "kernels avx2 (this processor runs avx512 as well)"
    assert captions.kernels(MACHINE, "avx2") == "kernels avx2", "a file that does not say what else there is"
    assert captions.machine(able, "avx512") == "A CPU, kernels avx512, 2 threads, commit abc"
    assert captions.heading(able, "avx512", threads=1) == "**A CPU, kernels avx512**, 1 thread, commit abc"


def test_a_busy_machine_is_said() -> None:
    assert captions.others({"others_cpu_share": 0.049}) == captions.others({}) == ""
    assert captions.others({"others_cpu_share": 0.2}) == "; other processes took 20% of its time"


def test_results_come_in_tables_of_one_kind() -> None:
    found = captions.by_kind(["b2", "a1", "b1"], lambda name: (name[0],))
    assert found == {("b",): ["b2", "b1"], ("a",): ["a1"]}
