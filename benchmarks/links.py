"""Links between ranks on one machine that are as slow as those between machines.

``network(2, mbit=100)`` puts each rank into a network namespace of its own. The namespaces are joined by veth pairs and
a bridge, and both directions of every pair are shaped by ``tc`` (token bucket): TCP itself meets the limit. That needs
root. Without root, or with ``kind="paced"``, ranks talk over the loopback interface and their links wait before
each send (``pace``): a model of a slow link, and labelled so. ``kind="loopback"`` shapes nothing.

Each rank is pinned to one core and computes with one thread; more ranks than cores get an equal part of one by a CPU
quota, where cgroups can be written. Ranks on one machine share its memory bus and caches, which machines do not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/cpu")
QUOTA_PERIOD_US = 20_000
PROBE_BYTES = 4 << 20
KINDS = ("namespace", "paced", "loopback")


@dataclass(frozen=True)
class Network:
    """Where ranks run and what their links are."""

    kind: str
    """"namespace", "paced" or "loopback"."""
    num_ranks: int
    mbit: float | None
    """Rate of each direction of each rank's link, in Mbit/s; None where it is not limited."""
    delay_s: float
    """Delay that the transport adds to each frame."""
    cpu_share: float
    """Part of a core that each rank has."""
    stem: str
    groups: tuple[Path, ...] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def interface(self) -> str | None:
        """Name of the interface of every rank, in its namespace; None is loopback."""
        return "rank0" if self.kind == "namespace" else None

    def command(self, rank: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs words as a rank."""
        core = rank % (os.cpu_count() or 1)
        pinned = ["taskset", "-c", str(core), *words]
        return ["ip", "netns", "exec", f"{self.stem}{rank}", *pinned] if self.kind == "namespace" else pinned

    def start(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start all ranks; they get the environment that torchrun would give them."""
        port = free_port()
        address = "10.77.0.1" if self.kind == "namespace" else "127.0.0.1"
        for rank in range(self.num_ranks):
            values = {
                "RANK": rank,
                "WORLD_SIZE": self.num_ranks,
                "LOCAL_WORLD_SIZE": self.num_ranks,
                "LOCAL_RANK": rank,
            }
            values |= {"MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            if self.kind == "paced":
                values |= {"VIVACE_PACE": f"{self.mbit or 0}:{self.delay_s}"}
            process = subprocess.Popen(
                self.command(rank, words),
                env={**os.environ, **(environment or {}), **{name: str(value) for name, value in values.items()}},
                stdout=None if rank == 0 else subprocess.DEVNULL,
                preexec_fn=self._begun(rank),
                start_new_session=True,
            )
            self.processes.append(process)

    def wait(self, limit_s: float) -> list[int]:
        """Return how all ranks ended; after ``limit_s`` seconds they are killed."""
        until = time.monotonic() + limit_s
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(max(0.1, until - time.monotonic()))
        self.kill()
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """End all ranks that still run."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _begun(self, rank: int) -> Callable[[], None]:
        """Return what a rank does first: it enters its group, and ends when the process that started it does."""
        prctl = ctypes.CDLL(None).prctl

        def begin() -> None:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if self.groups:
                (self.groups[rank] / "tasks").write_text(str(os.getpid()))

        return begin


@contextmanager
def network(
    num_ranks: int, *, kind: str | None = None, mbit: float | None = None, delay_s: float = 0.0, cpu_share: float = 1.0
) -> Iterator[Network]:
    """Make links between ranks, and remove them with everything that runs on them at the end.

    Args:
        num_ranks: number of ranks.
        kind: one of ``KINDS``; None is "namespace" where that can be made, else "paced", or "loopback" without limit.
        mbit: limit of each link in Mbit/s, None has none.
        delay_s: delay of each frame, which is added by the transport: only with "paced".
        cpu_share: part of a core that each rank has; below 1 it needs cgroups.

    Raises:
        ValueError: a kind is unknown, or cannot have a delay.
        OSError: namespaces or quotas cannot be made.
    """
    if kind is None:
        kind = "namespace" if can_make_namespaces() else "paced" if mbit or delay_s else "loopback"
    if kind not in KINDS or (delay_s and kind != "paced") or (mbit and kind == "loopback"):
        raise ValueError(f"a {kind} link of {mbit} Mbit/s with a delay of {delay_s} s cannot be made")
    stem = f"vr{os.getpid() % 10000}-"
    groups = _make_groups(num_ranks, cpu_share, stem) if cpu_share < 1 else ()
    made = Network(kind, num_ranks, mbit, delay_s, cpu_share, stem, groups)
    try:
        if kind == "namespace":
            _make_namespaces(made)
        yield made
    finally:
        made.kill()
        if kind == "namespace":
            _remove_namespaces(made)
        for group in groups:
            with suppress(OSError):
                group.rmdir()


def can_make_namespaces() -> bool:
    """Return whether this process may make network namespaces and shape links."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "taskset")))


def measured_rate(net: Network) -> float:
    """Return bytes per second of a plain TCP stream from rank 1 to rank 0, each in its own process."""
    address, port = ("10.77.0.1" if net.kind == "namespace" else "127.0.0.1"), free_port()
    receive = (
        "import socket,time,sys\n"
        f"s=socket.create_server(('{address}',{port}));c,_=s.accept();n=len(c.recv(1<<16));t=time.perf_counter()\n"
        "m=0\n"
        "while True:\n d=c.recv(1<<18)\n if not d: break\n m+=len(d)\n"
        "print(m/(time.perf_counter()-t))"
    )
    send = (
        "import socket,time\n"
        f"for _ in range(100):\n"
        f" try: s=socket.create_connection(('{address}',{port}));break\n"
        " except OSError: time.sleep(.05)\n"
        f"s.sendall(bytes({PROBE_BYTES}))"
    )
    receiving = subprocess.Popen(net.command(0, [sys.executable, "-c", receive]), stdout=subprocess.PIPE, text=True)
    subprocess.run(net.command(1, [sys.executable, "-c", send]), check=True, timeout=120)
    return float(receiving.communicate(timeout=120)[0])


def free_port() -> int:
    """Return a port that nobody listens on."""
    with closing(socket.socket()) as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def _make_namespaces(net: Network) -> None:
    hub = f"{net.stem}hub"
    _ip("netns", "add", hub)
    _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
    _ip("-n", hub, "link", "set", "bridge", "up")
    for rank in range(net.num_ranks):
        space = f"{net.stem}{rank}"
        _ip("netns", "add", space)
        _ip("-n", hub, "link", "add", f"port{rank}", "type", "veth", "peer", "name", "rank0", "netns", space)
        _ip("-n", hub, "link", "set", f"port{rank}", "master", "bridge", "up")
        _ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "rank0")
        _ip("-n", space, "link", "set", "rank0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        if net.mbit:
            for where, device in ((space, "rank0"), (hub, f"port{rank}")):
                limit = (
                    "rate",
                    f"{net.mbit}mbit",
                    "burst",
                    str(max(32_000, int(net.mbit * 1000 / 8))),
                    "latency",
                    "50ms",
                )
                _call("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def _remove_namespaces(net: Network) -> None:
    for name in [f"{net.stem}{rank}" for rank in range(net.num_ranks)] + [f"{net.stem}hub"]:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _make_groups(num_ranks: int, cpu_share: float, stem: str) -> tuple[Path, ...]:
    groups = tuple(CGROUP / f"{stem}{rank}" for rank in range(num_ranks))
    for group in groups:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(QUOTA_PERIOD_US * cpu_share)))
    return groups


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


class Pace:
    """A slow link as a wait before each frame: frames of one rank follow one another at a rate, after a delay."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        """Wait for frames of so many bytes per second; 0 has no limit."""
        self.bytes_per_s = bytes_per_s
        self.delay_s = delay_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Wait until a frame would have arrived."""
        with self._lock:
            now = time.monotonic()
            begun = max(now, self._free_at)
            self._free_at = begun + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)
            until = self._free_at + self.delay_s
        time.sleep(max(0.0, until - time.monotonic()))


def pace_links(spec: str) -> None:
    """Let all links of this process take their time: ``spec`` is "MBIT:DELAY_S"; to be called before ranks meet."""
    from vivace.parallel.links import Link

    mbit, delay = map(float, spec.split(":"))
    write, paces = Link._write, {}

    def paced(link: Link, parts: Sequence[memoryview]) -> None:
        paces.setdefault(id(link), Pace(mbit * 1e6 / 8, delay)).wait(sum(map(len, parts)))
        write(link, parts)

    Link._write = paced  # type: ignore[method-assign] - of a process that measures and ends


if __name__ == "__main__":
    if "VIVACE_PACE" in os.environ:
        pace_links(os.environ["VIVACE_PACE"])
    from vivace.cli.app import run

    sys.exit(run(sys.argv[1:]))
