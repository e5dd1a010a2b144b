"""What ``import vivace`` promises: quick, without torch, every public name there."""

from __future__ import annotations

import subprocess
import sys

import vivace


def test_import_does_not_load_torch() -> None:
    code = "import sys, vivace; sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_exists() -> None:
    for name in vivace.__all__:
        assert getattr(vivace, name) is not None


def test_public_names_are_listed() -> None:
    assert set(vivace.__all__) <= set(dir(vivace))
