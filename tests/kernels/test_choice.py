"""Which body runs: chosen by what the processor has, pinned by name, refused in one sentence."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from vivace.errors import ConfigError, DependencyError, UnsupportedError
from vivace.kernels import build, choice, library
from vivace.kernels.choice import choose

ALL = frozenset({"avx2", "avx512"})


def test_the_best_there_is(library: ctypes.CDLL) -> None:
    assert choose(features=ALL).name == "avx512"
    assert choose(features={"avx2"}).name == "avx2"
    assert choose(features=frozenset()).name == "torch"
    assert "neither" in choose(features=frozenset()).reason


def test_pinned(library: ctypes.CDLL) -> None:
    assert choose("avx2", features=ALL).name == "avx2"
    torch = choose("torch", features=ALL)
    assert (torch.name, torch.body) == ("torch", None)
    with pytest.raises(UnsupportedError, match="cannot run the avx512 kernels"):
        choose("avx512", features={"avx2"})
    with pytest.raises(ConfigError, match="did you mean 'avx512'"):
        choose("avx521")


def test_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs and the reason is said; asked for by name it is an error."""
    missing = library.open_library.__wrapped__
    monkeypatch.setattr(choice, "open_library", lambda: missing(tmp_path / "none.so"))
    chosen = choose()
    assert chosen.name == "torch"
    assert "not built; install a C++ compiler" in chosen.reason
    with pytest.raises(DependencyError, match="not built"):
        choose("avx512")


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(DependencyError, match="cannot be loaded"):
        library.open_library(tmp_path / "broken.so")


def test_a_library_of_other_sources(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    from vivace.kernels import library as module

    monkeypatch.setattr(module, "fingerprint", lambda: "0" * 16)
    with pytest.raises(DependencyError, match="other sources"):
        module.open_library.__wrapped__(build.LIBRARY)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found|no native body"):
        build.compile_library(tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()


def test_other_processors_have_no_native_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    with pytest.raises(build.BuildError, match="no native body"):
        build.compiler()
