"""The stores that ``benchmarks/flash.py`` measures: of a trained model with ReLU, or of a synthetic one."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.prompts import load_prompts, packaged_prompts
from vivace.storage.convert import write_store
from vivace.storage.io.async_reader import CHUNK_BYTES
from vivace.storage.io.readers import PAGE, DirectReader
from vivace.storage.neurons.calibration import calibrate, texts_of
from vivace.storage.neurons.ordering import find_orders
from vivace.storage.neurons.predictors import Predictor, PredictorConfig, save_predictors, split_held
from vivace.storage.store import Store

RANK = 64
"""Rank of the synthetic up-projections."""
ACTIVE_SHARE = 0.1
"""Share of the neurons that are active in the synthetic model."""
SHARED = 0.8
"""Length of the component that all embeddings share, relative to an embedding."""
SETTING = "setting.json"
"""File that describes a store made by ``take``."""


def make(folder: Path, width: int, ffn: int, layers: int, heads: int, vocab: int) -> None:
    """Write the synthetic checkpoint, its store of layers, its store of neurons, and a copy with rows and columns
    apart.
    """
    import transformers

    config = transformers.OPTConfig(
        vocab_size=vocab,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(config).to(torch.bfloat16)
    decoder = model.model.decoder
    below = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - ACTIVE_SHARE))
    predictors = []
    with torch.no_grad():
        shared = torch.randn(width)
        decoder.embed_tokens.weight.copy_(SHARED * shared + (1 - SHARED**2) ** 0.5 * torch.randn(vocab, width))
        decoder.embed_positions.weight.zero_()
        for layer in decoder.layers:
            up, down = torch.randn(ffn, RANK) / RANK**0.5, torch.randn(RANK, width) / width**0.5
            layer.fc1.weight.copy_(up @ down)
            layer.fc1.bias.fill_(-below.item())
            predictors.append(Predictor(down, up, torch.full((ffn,), -below.item() + 0.02)))
    model.save_pretrained(folder / "model")
    del model, decoder
    write_store(folder / "model", folder / "layers", kernels="torch")
    neurons = write_store(folder / "model", folder / "neurons", layout="neurons")
    save_predictors(neurons, predictors)
    split(neurons, folder / "neurons" / "apart.store")
    print(f"{folder}: {neurons.num_bytes / 1e9:.2f} GB")


def trial(source: Path, folder: Path, prompts: Path, predictors: PredictorConfig, *, is_ordered: bool) -> None:
    """Write the stores of a checkpoint as ``make`` does, and a prompt for it."""
    tokenizer = load_tokenizer(source)
    texts = texts_of(tokenizer, load_prompts(prompts))
    write_store(source, folder / "layers", kernels="torch")
    orders = find_orders(load_decoder(source), split_held(texts)[0]) if is_ordered else None
    neurons = write_store(source, folder / "neurons", layout="neurons", orders=orders)
    reports = [asdict(report) for report in calibrate(source, neurons, texts, predictors=predictors)]
    split(neurons, folder / "neurons" / "apart.store")
    prompt = tokenizer.encode_prompt(packaged_prompts("e2e")[0].request)
    setting = {
        "sparsity": f"of {source.name}",
        "prompt": prompt,
        "order": "activity" if is_ordered else "file",
        "training": asdict(predictors),
        "predictors": reports,
    }
    (folder / SETTING).write_text(json.dumps(setting) + "\n", encoding="utf-8")
    shares = [
        f"{name} {statistics.mean(each[name] for each in reports):.3f}"
        for name in ("active_share", "predicted_share", "recall")
    ]
    print(f"{folder}: {neurons.num_bytes / 1e9:.2f} GB, {', '.join(shares)}")


def setting_of(folder: Path) -> dict[str, Any]:
    """Return what ``take`` wrote; for a synthetic model, that its sparsity is synthetic."""
    path = folder / SETTING
    return json.loads(path.read_text()) if path.is_file() else {"sparsity": "synthetic"}  # type: ignore[no-any-return]


def split(store: Store, path: Path) -> None:
    """Copy a store so that rows of gate and up and columns of down follow one another instead of lying side by side."""
    with store.path.open("rb") as source, path.open("wb") as target:
        for bundle in store.bundles.values():
            if bundle.count == 1:
                continue
            pieces = len(bundle.parts)
            piece = bundle.stride // pieces
            assert piece % PAGE == 0, f"rows of {piece} bytes are not whole pages; take a larger width"
            source.seek(bundle.offset)
            records = torch.frombuffer(bytearray(source.read(bundle.num_bytes)), dtype=torch.uint8)
            target.seek(bundle.offset)
            target.write(records.view(bundle.count, pieces, piece).transpose(0, 1).contiguous().numpy().data)


class ApartReader(DirectReader):
    """Reads a store of neurons from a file that has rows and columns apart, with two or three reads instead of one.

    It reads whole records, so a pool must split its reads at records (``chunk_bytes``).
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store.folder / "apart.store")
        self._bundles = [bundle for bundle in store.bundles.values() if bundle.count > 1]
        self._whole = DirectReader(store.path)
        stride = self._bundles[0].stride
        self.chunk_bytes = max(1, CHUNK_BYTES // stride) * stride

    def read(self, offset: int, into: memoryview) -> None:
        """Read whole records."""
        bundle = next((b for b in self._bundles if b.offset <= offset < b.offset + b.num_bytes), None)
        if bundle is None:
            self._whole.read(offset, into)
            return
        pieces = len(bundle.parts)
        size = bundle.stride // pieces
        first, count = (offset - bundle.offset) // bundle.stride, len(into) // bundle.stride
        assert not (offset - bundle.offset) % bundle.stride, "the asynchronous reader cut through a record"
        assert not len(into) % bundle.stride, "the asynchronous reader cut through a record"
        for place in range(pieces):
            parts = [into[n * bundle.stride + place * size :][:size] for n in range(count)]
            for start in range(0, count, 512):  # buffers that one call takes
                some = parts[start : start + 512]
                at = bundle.offset + (place * bundle.count + first + start) * size
                assert os.preadv(self.file, some, at) == len(some) * size
