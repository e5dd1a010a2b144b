"""What a budget takes, as the kernel has it: a model of 300 MB in a process of its own, sampled while it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vivace.storage.convert import write_store
from vivace.storage.io.probing import device_bytes
from vivace.storage.store import Layout

SLACK = 64 << 20
PROBE = """
import json, sys, threading, time
import torch
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.choice import choose
from vivace.storage.loading import load_stored
from vivace.storage.io.probing import device_bytes
from vivace.storage.store import open_store

torch.set_num_threads(1)
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

peak, is_done = [0], threading.Event()
def sample():
    while not is_done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

torch.nn.functional.linear(torch.ones(4, 64), torch.ones(64, 64))
before = anonymous()
sampler = threading.Thread(target=sample)
sampler.start()
folder, budget = sys.argv[1], int(sys.argv[2])
body = choose("auto").body if open_store(folder).is_tiled else None
model, storage = load_stored(folder, budget or None, reader=sys.argv[3], num_tokens=256, body=body)
session = Session(model, num_slots=1, capacity=160)
session.admit(Request(tuple(range(100)), 6, NoDrafts(), logprobs=False))
tokens = [token for emitted in session.drain() for token in emitted.tokens]
is_done.set()
sampler.join()
read, device = storage.async_reader.traffic.num_bytes, device_bytes()
print(json.dumps({"peak": peak[0] - before, "tokens": tokens, "read": read, "device": device,
                  "planned": storage.plan.num_bytes}))
storage.close()
"""


def probe(folder: Path, budget: int, reader: str) -> dict[str, int]:
    words = [sys.executable, "-c", PROBE, str(folder), str(budget), reader]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        **{"vocab_size": 2048, "hidden_size": 1024, "word_embed_proj_dim": 1024, "ffn_dim": 4096},
        **{"num_hidden_layers": 12, "num_attention_heads": 16, "max_position_embeddings": 512},
    )
    folder = tmp_path_factory.mktemp("large")
    OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not say")
@pytest.mark.parametrize("layout", ["layers", "selected"])
def test_the_kernel_sees_no_more_than_the_budget(checkpoint: Path, layout: Layout) -> None:
    store = write_store(checkpoint / "model", checkpoint / layout, layout=layout)
    whole = probe(store.folder, 0, "buffered")
    assert whole["peak"] > 0.9 * store.num_bytes
    for share in (0.8, 0.95) if layout == "selected" else (0.4, 0.7):
        budget = int(store.num_bytes * share)
        found = probe(store.folder, budget, "direct")
        assert found["tokens"] == whole["tokens"]
        assert found["planned"] <= budget
        assert found["peak"] <= budget + SLACK, (found["peak"] / 2**20, budget / 2**20)
        if device_bytes() is not None:
            assert found["device"] == pytest.approx(found["read"], rel=0.02)
