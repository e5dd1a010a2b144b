"""What other processes take of the machine is told from what this one does."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from vivace.evaluate.others import watched_others

BUSY = "import time\nend = time.perf_counter() + 1.5\nwhile time.perf_counter() < end: pass"


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="cores tell what they did on Linux only")
def test_another_process_is_seen_and_own_work_is_not() -> None:
    used = time.process_time()
    with watched_others() as alone:
        end = time.perf_counter() + 1
        while time.perf_counter() < end:
            pass
    own_share = (time.process_time() - used) / (os.cpu_count() or 1)
    other = subprocess.Popen([sys.executable, "-c", BUSY])  # a child that has not ended is no work of ours
    time.sleep(0.3)
    with watched_others() as beside:
        time.sleep(1)
    other.wait()
    assert alone.cpu_share is not None
    assert beside.cpu_share is not None
    assert beside.cpu_share > 0.1, "it works all the time, on one of the cores"
    assert 0 <= alone.cpu_share <= 1 - own_share + 0.05, "own work would come on top of what others can have used"
