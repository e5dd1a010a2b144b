"""The benchmark of neurons from disk: what it reads from a file with rows and columns apart is what it would have."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.flash import Row, _same, equal_ms, fastest_like, table
from benchmarks.flash_models import ApartReader, split
from vivace.errors import UnsupportedError
from vivace.storage.convert import write_store
from vivace.storage.io.native_reader import open_async_reader
from vivace.storage.io.readers import BufferedReader, aligned
from vivace.storage.io.thread_reader import ThreadAsyncReader


def test_apart_gives_the_bytes_of_records(tmp_path: Path) -> None:
    """A layer is longer than what one read takes, and is cut between records."""
    config = transformers.LlamaConfig(
        **{"vocab_size": 32, "hidden_size": 1024, "intermediate_size": 240, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_act": "relu"},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    store = write_store(tmp_path / "model", tmp_path / "store", layout="neurons")
    bundle = store["layers.1.neurons"]
    split(store, store.folder / "apart.store")
    try:
        reader = ApartReader(store)
    except UnsupportedError as error:
        pytest.skip(str(error))
    found, expected = aligned(bundle.num_bytes), aligned(bundle.num_bytes)
    with closing(ThreadAsyncReader(reader, chunk_bytes=reader.chunk_bytes)) as apart:
        apart.submit_whole(found, bundle.offset).wait()
    with closing(open_async_reader(BufferedReader(store.path))) as bundled:
        bundled.submit_whole(expected, bundle.offset).wait()
    assert bundle.num_bytes > reader.chunk_bytes
    assert torch.equal(*(torch.frombuffer(each, dtype=torch.uint8) for each in (found, expected)))


def test_until_texts_part() -> None:
    assert [_same([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3], [2, 2, 3])] == [3, 1, 0]


def row(name: str, ms: float, read_ms: float, gb_per_s: float, asked: float | None = None) -> Row:
    rest = {"tokens_per_s": 1e3 / ms, "manage_ms": 0.0, "compute_ms": ms - read_ms, "gb_read": 1.0}
    memory = {"gb_from_device": 1.0, "planned_gb": 1.0, "anonymous_gb": 1.0}
    return Row(
        name=name, ms=ms, read_ms=read_ms, gb_per_s=gb_per_s, asked=asked, found=None, tokens=[1], **rest, **memory
    )


def test_speed_is_told_at_equal_reading_speed_too() -> None:
    """A first row that waits 1000 of 1200 ms at 1 GB/s would wait 500 at the 2 GB/s of a row that reads as it does."""
    rows = [
        row("naive", 1200, 1000, 1.0),
        row("hybrid", 400, 300, 2.0),
        row("hybrid, read ahead", 300, 100, 3.0),
        row("+ bundling", 100, 50, 4.0, asked=0.2),
    ]
    assert fastest_like(rows).name == "hybrid", "neurons and reads ahead are other ways to read"
    assert equal_ms(rows[0], rows[1]) == 700
    text = table(rows)
    assert "speed, had naive read at 2.00 GB/s" in text
    assert "| 12.0x | 7.0x | 1 of 1 |" in text
    assert "| 1.0x | 0.6x | 1 of 1 |" in text
