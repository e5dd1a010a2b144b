"""Names of tensors in GGUF files (ggml's ``gguf-py/gguf/constants.py``), by the names of our parameters."""

from __future__ import annotations

from collections.abc import Mapping

_WHOLE: Mapping[str, str] = {
    "embedding": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("attn_norm",),
    "attention_post_norm": ("post_attention_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "o": ("attn_output",),
    "ffn_norm": ("ffn_norm",),
    "ffn_post_norm": ("post_ffw_norm",),
    "feed_forward.up": ("ffn_gate", "ffn_up"),
    "feed_forward.down": ("ffn_down",),
}
"""The pieces that each of our parameters is made of, in their order."""
_FUSED: Mapping[str, str] = {"qkv": "attn_qkv", "feed_forward.up": "ffn_up"}
"""Where a family stores all pieces as one tensor."""


def gguf_names(ours: str, num_pieces: int) -> tuple[str, ...]:
    """Return the names of the tensors that one of our parameters is made of.

    Args:
        ours: name of the parameter.
        num_pieces: how many tensors it is made of in this family.
    """
    if ours in _WHOLE:
        return (_WHOLE[ours],)
    _, layer, rest = ours.split(".", 2)
    stem, _, leaf = rest.rpartition(".")
    pieces = (_FUSED[stem],) if stem in _FUSED and num_pieces == 1 else _LAYER[stem]
    return tuple(f"blk.{layer}.{piece}.{leaf}" for piece in pieces)
