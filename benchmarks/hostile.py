"""A hostile load: well-behaved clients beside malicious ones, against ``vivace serve`` on this machine.

    python -m benchmarks.hostile --seconds 600 --clients 64 --json benchmarks/results/serving/hostile.json

It starts the server, on the model that ships with method ``auto`` and two API keys, on a free port of the loopback
address; sends requests for the given time at most, and a limited number of them; and ends with status 1 if a bar is
missed. Greedy, sampled and scored requests must get what the engine computes before the server is started; all other
requests must get a status below 500. The server's delay is read from its own metrics and measured with ``/health`` from
a third process; the clients run with a lower priority than both (``nice``), since in practice they run on other
machines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import vivace
from benchmarks import hostile_clients, hostile_strangers
from benchmarks.hostile_answers import known_answers
from benchmarks.hostile_clients import Client, Target
from benchmarks.hostile_watch import Memory, Metrics, get, health_probe, loop_lag, wait_idle
from benchmarks.lateness import PROMISED_S
from benchmarks.result_files import write_report
from benchmarks.server_process import server_process
from vivace.engine import Engine
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.methods.table import METHODS

KEYS = ("a-key-of-the-hostile-load", "another-key-of-the-hostile-load")
LIMITS = ("--head-timeout", "4", "--body-timeout", "6", "--read-timeout", "8", "--prefix-cache", "16MiB",
          "--default-max-tokens", "64")  # fmt: skip
"""Short timeouts, so that slow clients reach them, and a small cache, so that it is soon full."""
KINDS = {**hostile_clients.KINDS, **hostile_strangers.KINDS}
ROUND = (*KINDS, "greedy", "greedy", "greedy", "sampled", "absurd")
"""Kinds of sixteen clients."""
SETTLES_S = 60.0
"""Seconds during which memory may grow."""
MOST_GROWTH = 0.05
"""Share by which memory may grow afterwards."""
ENDS_S = 150.0
"""Seconds for the last answers after the end."""


@dataclass(frozen=True)
class Bar:
    """A condition that must hold, and what was found."""

    name: str
    found: str
    is_met: bool


def attack(
    engine: Engine, log: Path, *, seconds: float, clients: int, most: int = 200_000, settles_s: float = SETTLES_S
) -> dict[str, Any]:
    """Start a server of the engine's model, run clients for a while, and report what happened.

    Args:
        engine: the model of the server, which computes the expected answers.
        log: file for what the server prints.
        seconds: how long requests are sent.
        clients: number of clients of all kinds.
        most: largest number of requests.
        settles_s: seconds for which memory may grow.
    """
    known = known_answers(engine)
    adapters = [f"--adapter={path.name}={path}" for path in sorted((engine.folder / "adapters").iterdir())]
    words = ("--model", str(engine.folder), *adapters, "--api-key-file", "-", *LIMITS)
    with watched_others() as others, server_process(*words, log=log, stdin="\n".join(KEYS)) as (url, process):
        ways = _lossless(url)
        target = Target(url, KEYS, ways, known)
        _warm_up(target)
        memory = Memory(process.pid)
        before = Metrics(url, KEYS[0])
        memory.start()
        with health_probe(url) as health:
            until = time.monotonic() + seconds
            crowd = [
                Client(number, kind, KINDS[kind], target, until=until, most=most // clients)
                for number, kind in zip(range(clients), ROUND * (clients // len(ROUND) + 1), strict=False)
            ]
            for client in crowd:
                client.start()
            for client in crowd:
                client.join(max(until + ENDS_S - time.monotonic(), 0))
        num_stuck = sum(client.is_alive() for client in crowd)
        is_idle = wait_idle(url, KEYS[0])
        after = Metrics(url, KEYS[0])
        memory.stop()
        has_ended = process.poll() is not None
    report = {
        "setting": {
            "model": engine.folder.name, "seconds": seconds, "clients": clients, "settles_s": settles_s,
            "methods": [f"{model}: {method}" for model, method in ways], "flags": [*LIMITS], "keys": len(KEYS),
            "others_cpu_share": others.cpu_share,
        },
        "kinds": {
            kind: {"sent": target.tally.sent[kind], "outcomes": dict(target.tally.outcomes[kind].most_common())}
            for kind in KINDS
        },
        "statuses": {str(status): count for status, count in sorted(target.tally.statuses.items())},
        "num_equal": target.tally.num_equal,
        "num_wrong": target.tally.num_wrong,
        "num_5xx": target.tally.num_5xx,
        "num_stuck": num_stuck,
        "faults": target.tally.faults,
        "server": {
            "sequences": after.by("vivace_requests_total", "state"),
            "statuses": after.by("vivace_http_responses_total", "status"),
            "connections_cut": after.by("vivace_connections_cut_total", "reason"),
            "tokens": after.value("vivace_generation_tokens_total"),
            "is_idle": is_idle, "has_ended": has_ended, "num_tracebacks": log.read_text().count("Traceback"),
        },
        "loop_lag": loop_lag(before, after),
        "health_lag": {
            "events": len(health.late_s), "period_s": health.period_s,
            **{name: health.quantile(share) for name, share in (("p50_s", 0.5), ("p99_s", 0.99), ("max_s", 1.0))},
        },
        "memory_mib": memory.mib,
    }  # fmt: skip
    return {**report, "bars": [asdict(bar) for bar in bars(report)]}


def _lossless(url: str) -> list[tuple[str, str]]:
    """Return models and methods of the server whose greedy answers are those of plain decoding."""
    cards = get(f"{url}/v1/models", KEYS[0]).json()["data"]
    return [(card["id"], method) for card in cards for method in card["methods"] if METHODS[method].lossless]


def _warm_up(target: Target) -> None:
    """Use everything once that the server starts on first use, such as the drafters of each method."""
    client = Client(0, "warm", hostile_clients.schema, target, until=0, most=0)
    known = target.known["greedy"][0]
    for model, method in target.ways:
        outcome = hostile_clients.compared(client, known, {**known.body, "model": model, "method": method})
        assert outcome == "200", f"{model}: {method}: {outcome}"
    for kind in ("greedy", "sampled", "schema", "echo"):
        for _ in range(3):
            KINDS[kind](client)
    client.close()
    target.tally.statuses.clear()
    target.tally.num_equal = 0


def growth(report: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the relative growth of memory after it should have settled: of its medians, and of its largest value; None
    where the run was too short to tell.

    Medians are taken over spans half as long as ``settles_s``, and both are compared with the median of the last span
    before it. A body that is read takes tens of megabytes for a moment.
    """
    span = int(report["setting"]["settles_s"] / 2)
    spans = [report["memory_mib"][start : start + span] for start in range(0, len(report["memory_mib"]), span)]
    if len(spans) < 3:
        return None
    settled, later = statistics.median(spans[1]), spans[2:]
    return max(map(statistics.median, later)) / settled - 1, max(map(max, later)) / settled - 1


def bars(report: Mapping[str, Any]) -> list[Bar]:
    """Return the conditions that must hold, and whether they do."""
    server, lag, health = report["server"], report["loop_lag"], report["health_lag"]
    sequences, seen = server["sequences"], report["statuses"]
    ended = sum(sequences[state] for state in ("finished", "failed", "cancelled"))
    server_5xx = sum(count for status, count in server["statuses"].items() if status >= "500")
    untold = {status: count for status, count in seen.items() if server["statuses"].get(status, 0) < count}
    grown = growth(report)
    memory = "the run was too short" if grown is None else "{:+.1%}, in single seconds {:+.1%}".format(*grown)
    return [
        Bar("bystanders are answered as offline", f"{report['num_equal']} equal", report["num_equal"] > 0),
        Bar("nothing that must not be", f"{report['num_wrong']} faults", report["num_wrong"] == 0),
        Bar("no 5xx seen", f"{report['num_5xx']}", report["num_5xx"] == 0),
        Bar("no 5xx counted by the server", f"{server_5xx:.0f}", server_5xx == 0),
        Bar("no traceback in the log", f"{server['num_tracebacks']}", server["num_tracebacks"] == 0),
        Bar("every client came to its end", f"{report['num_stuck']} did not", report["num_stuck"] == 0),
        Bar("idle and alive afterwards", f"{server['is_idle']}", server["is_idle"] and not server["has_ended"]),
        Bar(
            "every sequence is counted once",
            f"{sequences['received']:.0f} received, {ended:.0f} ended",
            sequences["received"] == ended > 0,
        ),
        Bar("every status seen was counted", f"not {untold}" if untold else "all", not untold),
        Bar("event loop, p99 below 100 ms", f"{lag['share_on_time']:.2%} on time", lag["share_on_time"] >= 0.99),
        Bar("/health, p99 below 100 ms", f"{1e3 * health['p99_s']:.1f} ms", health["p99_s"] < PROMISED_S),
        Bar("memory within 5 %", memory, grown is not None and grown[0] <= MOST_GROWTH),
    ]


def main() -> int:
    """Run the load, print and write the report; the exit status tells whether all bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200_000, help="at most, of all clients together")
    parser.add_argument("--log", type=Path, help="file for what the server prints")
    parser.add_argument("--json", type=Path, help="file for the report")
    asked = parser.parse_args()
    origin = asdict(provenance(torch.device("cpu")))
    engine = vivace.load()
    with TemporaryDirectory() as folder:
        log = asked.log or Path(folder) / "server.log"
        report = attack(engine, log, seconds=asked.seconds, clients=asked.clients, most=asked.requests)
    for kind, found in report["kinds"].items():
        print(f"{kind:12s} {found['sent']:7d}  {found['outcomes']}")
    for fault in report["faults"]:
        print(f"fault: {fault[:400]}")
    for bar in report["bars"]:
        print(f"{'met   ' if bar['is_met'] else 'MISSED'} {bar['name']}: {bar['found']}")
    if asked.json is not None:
        write_report(asked.json, {"provenance": origin, **report})
    return 0 if all(bar["is_met"] for bar in report["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
