"""A copy of the program and its tests, a defect in it, and which tests fail there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.mutants.records import Mutant, OutOfDate

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests")
LINKED = ("benchmarks", "tools", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
NATIVE = "src/vivace/kernels/native"
LONGEST_S = 600.0
"""Tests that take longer hang."""


def changed(mutant: Mutant, root: Path = ROOT) -> bytes:
    """The file of a mutant with its defect.

    Raises:
        OutOfDate: the record does not fit the program any more; says which one to mend.
    """
    try:
        content = (root / mutant.file).read_bytes()
        made = mutant.change(content)
        if made == content:
            raise OutOfDate("it changes nothing")
    except (OSError, OutOfDate) as error:
        record = f"the record {mutant.name!r} in tests/mutants/records.py"
        raise OutOfDate(f"mend {record}: {mutant.file}: {error}") from None
    return made


class Copy:
    """The program and its tests in a folder of their own; what is planted there harms nobody."""

    def __init__(self, root: Path) -> None:
        """Copy everything that tests read to ``root``, compiled kernels and weights included."""
        self.root = root
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in LINKED:
            (root / name).symlink_to(ROOT / name)

    def plant(self, mutant: Mutant) -> None:
        """Put its defect in; kernels are compiled again where it lies in their source."""
        path = self.root / mutant.file
        path.write_bytes(changed(mutant, self.root))
        if mutant.file.startswith(NATIVE):
            command = [sys.executable, "-m", "vivace.kernels.build"]
            subprocess.run(command, check=True, cwd=self.root, env=self._environment(), timeout=LONGEST_S)

    def failures(self, tests: Sequence[str]) -> tuple[set[str], set[str]]:
        """Run tests; those of which a case failed, and those of which no case did.

        Raises:
            AssertionError: a test was not found, or could not run at all.
        """
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *tests],
            cwd=self.root,
            env=self._environment(),
            timeout=LONGEST_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), f"{tests} could not be run:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        cases = ElementTree.parse(report).getroot().iter("testcase")
        failed = {_name(case) for case in cases if case.find("failure") is not None}
        noticed = {test for test in tests if any(case == test or case.startswith(f"{test}[") for case in failed)}
        assert done.returncode == 0 or failed, f"{tests} failed before they began:\n{done.stdout[-4000:]}"
        return noticed, set(tests) - noticed

    def _environment(self) -> dict[str, str]:
        """This process's, but for what pytest tells its own workers; a file that was changed is never read compiled."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        path = os.pathsep.join(map(str, (self.root / "src", self.root)))
        return kept | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def _name(case: ElementTree.Element) -> str:
    """A case as pytest names it on the command line; tests stand in no classes here."""
    return f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
