"""Directories, Hub ids, and writing that is complete or not there at all."""

from __future__ import annotations

import errno
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors

from vivace.checkpoint.files import read_json, read_tensors, resolve, staged, summary, write_tensors
from vivace.checkpoint.load import load_config
from vivace.errors import CheckpointError, CorruptError, NotFoundError


class Hub:
    """Stands in for ``snapshot_download``."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, list[str]]] = []

    def __call__(self, name: str, *, allow_patterns: list[str]) -> str:
        self.asked.append((name, allow_patterns))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def refused(kind: type[Exception]) -> Exception:
    """An error of huggingface_hub without the response it wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, "403 Client Error.\n\nYou need to\nagree")
    return error


def test_a_hub_id_is_fetched(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(llama)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert load_config("someone/model") == load_config(llama)
    assert hub.asked[0][0] == "someone/model"
    assert "*.safetensors" in hub.asked[0][1]
    assert not any("bin" in pattern or "pt" in pattern for pattern in hub.asked[0][1])


def test_a_directory_comes_before_the_hub(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(NotFoundError("asked"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.chdir(llama.parent.parent)
    assert resolve(f"{llama.parent.name}/llama").is_dir()
    for path in ("./some/where", "/some/where/else", "some/where/else", "somewhere", "~/x"):
        with pytest.raises(NotFoundError, match="there is no checkpoint directory"):
            resolve(path)
    assert hub.asked == []


def test_a_model_of_the_package_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of the same name comes first, and what is inside a packaged model has none."""
    monkeypatch.chdir(tmp_path)
    assert (resolve("vivace-14m") / "tokenizer.json").is_file()
    (tmp_path / "vivace-14m").mkdir()
    assert resolve("vivace-14m") == Path("vivace-14m")
    with pytest.raises(NotFoundError):
        resolve("vivace-14m/draft/..")


@pytest.mark.parametrize(
    ("kind", "offline", "said"),
    [
        (errors.LocalEntryNotFoundError, True, "no local copy of the Hub repository a/b, and HF_HUB_OFFLINE is set"),
        (errors.LocalEntryNotFoundError, False, "the Hub cannot be reached"),
        (errors.GatedRepoError, False, "is gated; accept its terms"),
        (errors.RepositoryNotFoundError, False, "neither a directory nor a Hub repository a/b"),
        (errors.HfHubHTTPError, False, "could not be fetched: 403 Client Error. You need to agree"),
        (OSError, False, "could not be fetched"),
    ],
)
def test_what_the_hub_says(kind: type[Exception], offline: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(refused(kind)))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(NotFoundError) as caught:
        resolve("a/b")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_for_real() -> None:
    """The tests run with HF_HUB_OFFLINE=1: huggingface_hub itself says there is no copy."""
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE is set"):
        resolve("nobody/has-this-model")


def test_staging_moves_all_files_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with staged(target) as staging:
        (staging / "a").write_text("1")
        (staging / "b").write_text("2")
        assert not target.exists()
    assert sorted(file.name for file in target.iterdir()) == ["a", "b"]
    with staged(target) as staging:
        (staging / "a").write_text("3")
    assert (target / "a").read_text() + (target / "b").read_text() == "32"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug"), KeyboardInterrupt()]
)
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("old")
    expected = CheckpointError if isinstance(error, OSError) else type(error)

    def write() -> None:
        with staged(target) as staging:
            (staging / "a").write_text("new")
            raise error

    with pytest.raises(expected) as caught:
        write()
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert [file.read_text() for file in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def write_all(target: Path, *names: str) -> None:
    with staged(target) as staging:
        for name in names:
            (staging / name).write_text("new")


def test_a_folder_in_the_place_of_a_file_is_found_before_anything_is_moved(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "weights").mkdir(parents=True)
    (target / "config.json").write_text("old")
    with pytest.raises(CheckpointError, match=r"and is as it was: .*weights is a folder"):
        write_all(target, "a", "config.json", "weights")
    assert (target / "config.json").read_text() == "old"
    assert not (target / "a").exists()


def test_a_configuration_comes_last_and_a_target_that_is_in_part_new_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, moved = Path.replace, list[str]()

    def failing(self: Path, target: Path) -> Path:
        if self.name == "weights":
            raise OSError(errno.EIO, "Input/output error")
        moved.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(CheckpointError, match="only in part: write it again"):
        write_all(tmp_path / "target", "config.json", "a", "weights")
    assert moved == ["a"]


def test_a_read_only_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"), staged(tmp_path / "file" / "target"):
        pass


def test_reading_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "x.safetensors", tensors)
    found = read_tensors(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with pytest.raises(NotFoundError, match=r"has no y\.safetensors"):
        read_tensors(tmp_path / "y.safetensors")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-3])
    with pytest.raises(CorruptError, match="truncated"):
        read_tensors(tmp_path / "x.safetensors")


def test_long_lists_are_cut() -> None:
    assert summary(["a", "b"]) == "a, b"
    assert summary([str(i) for i in range(9)]) == "0, 1, 2, 3, 4 and 4 more"


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"r": ' + "9" * 5000 + "}", "{", "\udcff"], ids=["deep", "digits", "half", "no text"]
)
def test_what_cannot_be_read_as_json_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptError, match=r"adapter_config\.json is not readable JSON") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)
