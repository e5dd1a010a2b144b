"""Compiles the native kernels while the package is installed or built; without a compiler it installs all the same."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """Puts the compiled bodies beside their sources; the wheel is then for this kind of machine."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say in one sentence why not."""
        kernels = Path(self.root, "src", "vivace", "kernels")
        build = _load(kernels / "build.py")
        try:
            library = build.compile_library()
        except build.BuildError as error:
            build.LIBRARY.unlink(missing_ok=True)
            self.app.display_warning(f"{error}; vivace installs without native kernels and runs on torch's")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("vivace_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
