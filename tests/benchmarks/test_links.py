"""Links between ranks on one machine: what they carry, how fast, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rank_simulator
from benchmarks.links import CGROUP, Pace, can_make_namespaces, measured_rate, network
from benchmarks.parallel import measure
from benchmarks.parallel_tables import MixedError, answers, cells_of, choices, decoding, measured
from tests.tiny_checkpoints import make_checkpoint
from vivace.parallel.auto import CHOSEN
from vivace.parallel.partition import first_token_s, punctual

pytestmark = pytest.mark.multiprocess
WAYS = (
    "one,auto,tensor,tensor:int8,sequence,sequence-causal,pipeline,pipeline-gathered,runahead-even,runahead,"
    "runahead-tensor,runahead-tensor:int8"
)
NEEDS_ROOT = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip, tc and taskset")

PROVENANCE = {
    "cpu": "A CPU",
    "best_kernels": "avx2",
    "num_threads": 1,
    "commit": "abc",
    "packages": {},
    "device": "cpu",
}


def spaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout


@NEEDS_ROOT
def test_ways_are_measured_over_shaped_links_and_bytes_are_those_of_the_interface(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", context=1024)
    before = spaces()
    with network(2, kind="namespace", mbit=200) as net:
        assert 20 < measured_rate(net) * 8 / 1e6 < 220, "a busy machine may be slower than the limit, never faster"
        words = ["--lengths", "600", "--ways", WAYS, "--batches", "4", "--new-tokens", "4", "--search", "2"]
        report = measure(net, str(model), [*words, "--repeats", "1"], 100)
    assert report["statuses"] == [0, 0]
    assert spaces() == before
    rows = {(row["way"], row["what"]): row for row in report["rows"]}
    assert {way for way, _ in rows} == set(WAYS.split(","))
    tensor, runahead = rows["tensor", "first token"], rows["runahead-even", "first token"]
    for row in rows.values():
        assert row["interface_out"] == pytest.approx(row["sent_bytes"], rel=0.02, abs=2000)
    assert rows["auto", "first token"]["chosen"] in CHOSEN
    predicted = [row["predicted_s"] for (way, what), row in rows.items() if what == "first token" and ":" not in way]
    assert all(seconds > 0 for seconds in predicted), "every way is predicted"
    gathered = rows["pipeline-gathered", "first token"]
    stage = 1 * 599 * 2 * 16 * 4  # layers of rank 1, entries, keys and values, width of a head
    assert gathered["interface_in"] == pytest.approx(stage + 599 * 32 * 4, rel=0.05), "entries and rows"
    width, num_layers = 32, 2
    assert tensor["sent_bytes"] > 2 * num_layers * 600 * width * 4
    entries = num_layers * 256 * 2 * 16 * 4  # of the first piece: layers, entries, keys and values, width of a head
    assert runahead["counts"] == [256, 343]
    assert runahead["interface_in"] == pytest.approx(entries, rel=0.05)


@NEEDS_ROOT
def test_bytes_that_wait_before_a_slow_link_are_counted_for_the_way_that_sent_them(tmp_path: Path) -> None:
    """Rank 0 ends a sequence with 44 kB on their way, which take a tenth of a second here; rank 0 alone comes next."""
    model = make_checkpoint(tmp_path / "model", context=1024)
    words = ["--lengths", "600", "--ways", "one,sequence-causal", "--batches", "0", "--repeats", "1"]
    with network(2, kind="namespace", mbit=4) as net:
        report = measure(net, str(model), words, 100)
    one, sequence = report["rows"]
    assert one["sent_bytes"] == 0
    assert max(one["interface_out"], one["interface_in"]) < 500, "at most a packet that TCP sent twice"
    assert sequence["sent_bytes"] > 2 * 343 * 2 * 16 * 4, "layers, entries, keys and values, width of a head"
    assert sequence["interface_out"] == pytest.approx(sequence["sent_bytes"], rel=0.02)


def test_paced_links_take_their_time(tmp_path: Path) -> None:
    pace, started = Pace(1e6, 0.01), time.monotonic()
    for _ in range(3):
        pace.wait(20_000)
    assert 0.07 <= time.monotonic() - started < 0.3
    model = make_checkpoint(tmp_path / "model", context=1024)
    words = ["--lengths", "600", "--ways", "one,tensor", "--batches", "0", "--repeats", "1"]
    with network(2, kind="paced", mbit=8) as net:
        report = measure(net, str(model), words, 100)
    (_, tensor) = report["rows"]
    assert tensor["median_s"] > 0.9 * 2 * 2 * 600 * 32 * 4 / 1e6, "1 MB/s"
    assert tensor["interface_out"] is None


def test_wrong_links_are_refused_and_ranks_end_with_the_bench() -> None:
    for given in ({"kind": "radio"}, {"kind": "loopback", "mbit": 5.0}, {"kind": "namespace", "delay_s": 1.0}):
        with pytest.raises(ValueError, match="cannot be made"), network(2, **given):  # type: ignore[arg-type]
            pass
    with network(2, kind="loopback") as net:
        net.start([sys.executable, "-c", "import time; time.sleep(60)"])
        assert net.wait(0.3) == [-9, -9]


@pytest.mark.skipif(not os.access(CGROUP, os.W_OK), reason="needs cgroups that can be written")
def test_ranks_get_their_part_of_a_core() -> None:
    spin = "import time\nt=time.monotonic()\nwhile time.monotonic()-t<.6: pass\nprint(time.process_time())"
    with network(1, kind="loopback", cpu_share=0.25) as net:
        assert (net.groups[0] / "cpu.cfs_quota_us").read_text().strip() == "5000"
        net.start([sys.executable, "-c", spin])
        assert net.wait(20) == [0]
    assert not net.groups[0].exists()


def test_simulated_ranks_keep_the_laws_of_the_note() -> None:
    shape, *_ = rank_simulator.PAPER[0]
    machine = shape.machine(rank_simulator.A100_FLOPS, 300e9, 4.0)
    calm = rank_simulator.simulate(12288, 4, machine)
    assert calm["runahead"] < calm["runahead-even"] <= calm["sequence"] * 1.001
    assert calm["runahead"] < calm["one"]
    late = rank_simulator.simulate(12288, 4, shape.machine(rank_simulator.A100_FLOPS, 10e9, 1.0), jitter=0.2, seed=1)
    same = rank_simulator.simulate(12288, 4, shape.machine(rank_simulator.A100_FLOPS, 10e9, 1.0), jitter=0.2, seed=1)
    none = rank_simulator.simulate(12288, 4, shape.machine(rank_simulator.A100_FLOPS, 10e9, 1.0))
    assert late == same
    assert late["sequence"] / none["sequence"] > late["runahead"] / none["runahead"] > 1


def test_auto_is_counted_beside_the_fastest_way() -> None:
    def row(way: str, seconds: float, length: int) -> dict[str, Any]:
        return {"way": way, "what": "first token", "num_tokens": length, "median_s": seconds, "chosen": "one"}

    rows = [row("auto", 1.05, 512), row("pipeline", 1.0, 512), row("one", 2.0, 512)]
    rows += [row("auto", 1.2, 2048), row("tensor", 1.0, 2048)]
    told = choices([{"link": {"mbit": 100}, "rows": rows}])
    assert "within 10% of it in 1 of 2 cells" in told
    assert "| 100 Mbit/s | 512 | one | 1.05 | pipeline | 1.00 | 1.05 |" in told
    assert choices([{"link": {"mbit": 100}, "rows": rows[1:3]}]) == ""


def test_steps_that_are_shorter_than_pauses_of_a_part_of_a_core_are_left_out() -> None:
    rows = [{"way": "one", "what": "decoding", "batch": batch, "median_s": s} for batch, s in ((1, 0.002), (16, 0.2))]
    link = {"mbit": 100, "cpu_share": 0.5}
    assert "| 1 |" not in decoding([{"link": link, "rows": rows}])
    assert "| 100 Mbit/s | 16 | 200.0 |" in decoding([{"link": link, "rows": rows}])
    assert "| 100 Mbit/s | 1 | 2.0 |" in decoding([{"link": link | {"cpu_share": 1}, "rows": rows}])


def test_an_answer_behind_a_prompt_has_the_steps_of_its_way() -> None:
    firsts = {"one": 3.0, "tensor": 2.5, "runahead-model": 1.5, "runahead-tensor": 1.6}
    rows = [{"way": way, "what": "first token", "num_tokens": 512, "median_s": s} for way, s in firsts.items()]
    rows += [{"way": way, "what": "decoding", "batch": 1, "median_s": s} for way, s in (("one", 0.1), ("tensor", 0.06))]
    told = answers([{"link": {"mbit": None}, "rows": rows}])
    assert "| not shaped | 512 | 9.22 | 14.20 | 15.70 | 10.12 |" in told
    assert answers([{"link": {"mbit": None}, "rows": rows[1:]}]) == ""


def test_the_simulator_has_the_chain_of_the_engine() -> None:
    shape, *_ = rank_simulator.PAPER[0]
    machine = replace(shape.machine(rank_simulator.A100_FLOPS, 10e9, 1.0), is_dense=False)
    for entry_work_s in (0.0, 3e-7):
        costs = replace(machine.costs, entry_work_s=entry_work_s)
        found = rank_simulator.runahead_s([1024, 768, 512], replace(machine, costs=costs), punctual)
        assert found == pytest.approx(first_token_s([1024, 768, 512], costs))


def test_ranks_of_another_number_have_a_table_of_their_own(tmp_path: Path) -> None:
    row = {"way": "one", "what": "first token", "num_tokens": 512, "median_s": 1.0}
    two = cell() | {"rows": [row], "provenance": PROVENANCE}
    two["link"] = two["link"] | {"kind": "paced", "measured_mbit": 96.0}
    four = two | {"link": two["link"] | {"ranks": 4, "cpu_share": 0.5}, "rows": [row | {"median_s": 3.0}]}
    (tmp_path / "both.json").write_text(json.dumps({"is_simulated": False, "cells": [two, four]}))
    written = measured(tmp_path)
    assert "2 ranks on one machine, 1 of a core" in written
    assert "4 ranks on one machine, 0.5 of a core" in written
    assert "| 100 Mbit/s | 512 | **1.00** |" in written
    assert "| 100 Mbit/s | 512 | **3.00** |" in written


def cell(**changed: Any) -> dict[str, Any]:
    """A cell as a bench writes it: ranks that take twice as long beside others, and attention that gets slower."""
    costs = {"project_s": 2e-6, "feed_s": 2e-5, "attend_s": 1e-8, "num_layers": 4, "latency_s": 1e-5, "entry_s": 1e-6}
    costs |= {"attention": [[128, 1e-6], [896, 9e-6], [3968, 60e-6]], "masked": [[256, 8e-6], [4096, 99e-6]]}
    alone = costs | {"project_s": 1e-6, "feed_s": 1e-5}
    works = [{"project": 0.6, "attend": 2 / 3, "output": 0.1, "ffn": 0.4}] * 2
    setting = {"costs": costs, "alone": alone, "works": {"2": works}, "link": {"bytes_per_s": 1e7}, "row_bytes": 64}
    setting |= {"model": "m", "kernels": "avx2", "dtype": "bfloat16", **changed}
    link = {"ranks": 2, "cpu_share": 1.0, "mbit": 100}
    return {"setting": setting, "link": link, "provenance": {"cpu": "one"}, "rows": []}


def test_the_simulator_takes_one_from_an_idle_world_and_everything_else_from_a_busy_one() -> None:
    machine = rank_simulator.machine_of(cell())
    found = rank_simulator.simulate(4096, 2, machine)
    attention = machine.costs.attention_s(4096, 0)
    assert found["one"] == pytest.approx(4 * (1.1e-5 * 4096 + attention))
    busy = 4 * (2.2e-5 * 4096 + attention)
    assert found["pipeline"] > busy / 2
    assert found["pipeline-gathered"] >= found["pipeline"]
    assert found["auto"] == min(found[way] for way in ("one", "runahead", "sequence-causal", "pipeline-gathered"))


def test_the_simulator_has_lengths_masks_and_shares_of_their_own() -> None:
    whole = cell()
    flat = cell(costs=whole["setting"]["costs"] | {"attention": [], "masked": []})
    even = cell(works={})
    given, at_once, equal = (
        rank_simulator.simulate(4096, 2, rank_simulator.machine_of(one)) for one in (whole, flat, even)
    )
    assert given["runahead"] > at_once["runahead"], "long prefixes slow attention down"
    assert given["sequence"] > at_once["sequence"], "masked attention has kernels of its own"
    attention = rank_simulator.machine_of(whole).costs.attention_s(4096, 0)
    assert given["tensor"] - equal["tensor"] == pytest.approx(4 * (attention / 6 + (0.6 - 0.5) * 2e-6 * 4096))


def test_coefficients_of_ranks_come_from_other_runs_of_the_same_machine() -> None:
    own, slow, slower = cell(), cell(), cell(kernels="torch")
    slow["setting"]["costs"] = slow["setting"]["costs"] | {"feed_s": 3e-5, "latency_s": 1.0}
    slower["setting"]["costs"] = slower["setting"]["costs"] | {"feed_s": 9.0}
    machine = rank_simulator.machine_of(own, [own, slow, slower])
    assert (machine.costs.feed_s, machine.costs.latency_s) == (3e-5, 1e-5)
    assert rank_simulator.machine_of(own, [own, slower]).costs.feed_s == 2e-5
    between = rank_simulator.machine_of(own, [own, slow, cell()])
    assert "runahead" in rank_simulator.simulate(2048, 2, between), "layers are counted between two runs too"


def test_simulated_and_measured_results_do_not_mix(tmp_path: Path) -> None:
    measured, simulated = tmp_path / "a.json", tmp_path / "b.json"
    measured.write_text(json.dumps({"is_simulated": False, "cells": [{"link": {}, "rows": []}]}))
    simulated.write_text(json.dumps({"is_simulated": True, "cells": []}))
    assert len(cells_of([measured])) == 1
    with pytest.raises(MixedError, match=r"b\.json is simulated"):
        cells_of([measured, simulated])
