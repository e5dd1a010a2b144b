"""Memory of a long prompt at a wide vocabulary, as the system counts it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT, WIDE, MIB = 8192, 128_000, 2**20

PROGRAM = f"""
import json, sys
import torch
from vivace.checkpoint.load import load_decoder
from vivace.core.cpu.backend import pack_decoder
from vivace.decode.lookup import PromptLookup
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.evaluate.memory import peak_memory
from vivace.kernels.choice import choose

def answer(model, length):
    tokens = tuple(place * 7919 % {WIDE} for place in range(length))
    session = Session(model, num_slots=1, capacity=length + 8)
    session.admit(Request(tokens, 3, PromptLookup(), logprobs=True))
    return sum(len(emitted.tokens) for emitted in session.drain())

def growth(model):
    answer(model, 600)  # one whole chunk: whatever the first use of a kernel takes
    with peak_memory(model.device) as before:
        pass
    with peak_memory(model.device) as after:
        assert answer(model, {PROMPT}) == 3
    return None if after.num_bytes is None else after.num_bytes - before.num_bytes

torch.set_num_threads(1)
model = load_decoder(sys.argv[1])
found = dict(torch=growth(model))
body = choose("auto").body
if body is not None:
    pack_decoder(model, body)
    found["native"] = growth(model)
with peak_memory(model.device) as before:
    pass
with peak_memory(model.device) as after:
    torch.ones(256, {WIDE})  # the logits of one chunk, to see that they would be seen
found["logits of a chunk"] = None if after.num_bytes is None else after.num_bytes - before.num_bytes
print(json.dumps(found))
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_an_8k_prompt_at_128k_words_needs_little_memory(tmp_path: Path) -> None:
    """All its logits would be 3.9 GiB and those of one chunk 125 MiB; keys and values of one layer are half a MiB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": WIDE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
        **{"max_position_embeddings": 2 * PROMPT, "bos_token_id": None, "eos_token_id": None},
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found["torch"] is None:
        pytest.skip("this system does not let the high-water mark be reset")
    assert found.pop("logits of a chunk") > 100 * MIB
    for kernels, num_bytes in found.items():
        assert num_bytes < 64 * MIB, f"{kernels} kernels: {num_bytes / MIB:.0f} MiB"
