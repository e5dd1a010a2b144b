"""A Llama checkpoint of a few kilobytes as transformers writes it, with a tokenizer and a chat template."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.load import load_config
from vivace.decode.shallow import DraftPlan
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.residual import Accelerator
from vivace.prompts import Prompt, packaged_prompts, save_prompts

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def make_checkpoint(folder: Path, *, seed: int = 0, vocab_size: int = 320, context: int = 256, layers: int = 2) -> Path:
    """Write a random model; the head is scaled so that answers vary."""
    shutil.copytree(_made(seed, vocab_size, context, layers), folder, dirs_exist_ok=True)
    torch.manual_seed(seed)  # what is drawn next is the same, whether somebody asked for this model before or not
    return folder


@cache
def _everything() -> tempfile.TemporaryDirectory[str]:
    """Where models are kept that this process has made; it is gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="vivace-tests-")


@cache
def _made(seed: int, vocab_size: int, context: int, layers: int) -> Path:
    """A model that is made once in each process, as training its tokenizer takes a while."""
    folder = Path(_everything().name) / f"{seed}-{vocab_size}-{context}-{layers}"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((str(p.request) for p in packaged_prompts("e2e")), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(
    folder: Path, checkpoint: Path, *, kind: str = "multirate", gate: int = 1, plan: DraftPlan | None = None
) -> Path:
    """Write an untrained accelerator for a checkpoint."""
    torch.manual_seed(2)
    config = MultirateConfig(exit_layer=gate, rank=4, bottleneck=8)
    tensors = Accelerator(config, load_config(checkpoint)).tensors()
    written = asdict(plan or DraftPlan.chain(3))
    save_adapter(folder, kind, base_hash(checkpoint), written, asdict(config), tensors)
    return folder


def main() -> None:
    """``python -m tests.tiny_checkpoints FOLDER``: a model to try something on, and rows that it can learn."""
    folder = make_checkpoint(Path(sys.argv[1]), layers=4)
    rows = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
    save_prompts(folder / "rows.jsonl", rows)


if __name__ == "__main__":
    main()
