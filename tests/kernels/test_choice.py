"""Which body runs: chosen by what the processor has, pinned by name, refused in one sentence."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from vivace.errors import ConfigError, DependencyError, UnsupportedError
from vivace.kernels import build, choice, library
from vivace.kernels.choice import choose

ALL = frozenset({"avx2", "avx512", "amx"})


def test_the_best_there_is(library: ctypes.CDLL) -> None:
    assert choose(features=ALL).name == "amx"
    assert choose(features=ALL - {"amx"}).name == "avx512"
    assert choose(features={"avx2"}).name == "avx2"
    assert choose(features=frozenset()).name == "torch"
    assert "neither" in choose(features=frozenset()).reason


def test_pinned(library: ctypes.CDLL) -> None:
    assert choose("avx2", features=ALL).name == "avx2"
    torch = choose("torch", features=ALL)
    assert (torch.name, torch.body) == ("torch", None)
    with pytest.raises(UnsupportedError, match="cannot run the avx512 kernels"):
        choose("avx512", features={"avx2"})
    with pytest.raises(UnsupportedError, match=r"its system or the compiler .* cannot run the amx kernels"):
        choose("amx", features=ALL - {"amx"})
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


def test_a_compiler_without_amx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other bodies are built all the same, and it is said; a body that every compiler knows is no option."""
    compiled: list[str] = []

    def call(_: str, *flags: str) -> None:
        if refused in flags:
            raise build.BuildError(f"unrecognized option {refused}")
        compiled.extend(Path(flag).name for flag in flags if flag.endswith(".cpp"))
        Path(flags[-1]).touch()

    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(build, "_call", call)
    refused = "-mamx-tile"
    build.compile_library(tmp_path / "out.so")
    assert compiled == list(build.UNITS)
    assert "-mamx-tile; the library is built without the amx kernels" in capsys.readouterr().err
    refused = "-mavx2"
    with pytest.raises(build.BuildError, match="unrecognized option -mavx2"):
        build.compile_library(tmp_path / "other.so")


def test_other_processors_have_no_native_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    with pytest.raises(build.BuildError, match="no native body"):
        build.compiler()
