"""Training a tokenizer: a byte-level BPE whose merges attach the leading space last.

Plain byte-level BPE learns ``Ġthe`` before or after ``the``, whichever is more frequent, so a rare word is often cut
differently at the start of a text, behind a bracket and behind a space. A small model that has to *copy* a
name must then translate between two spellings. Here merges are learnt on words without their prefix (a
space, or the underscore inside a column name), and the merges that attach a prefix to the first piece of a word
follow after all others. A word therefore has the same inner pieces wherever it stands; only its first piece may carry
the prefix. The result is an ordinary ``tokenizer.json`` (byte-level BPE of Wang et al. 2020, arXiv:1909.03341).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pieces

from vivace.checkpoint.files import staged
from vivace.errors import ConfigError

END, USER, ASSISTANT, PAD = SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|pad|>")
"""Special tokens, with the ids 0 to 3."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role']=='assistant' %}{{ '<|assistant|>'+m['content']+'<|end|>' }}"
    "{% else %}{{ '<|user|>'+m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_WORDS = r"'(?:s|t|re|ve|m|ll|d)\b|[ _]?\p{L}+|[ _]?\p{N}+| ?[^\s\p{L}\p{N}_]+|_+|\s+(?!\S)|\s+"
_PREFIXES = "Ġ_"  # the byte-level spelling of a space, and the underscore
_CORE_SHARE = 0.68
# A word counts at most so often, so that the words of a prompt template do not decide every merge.
_COUNT_CAP = 4000
_SMALLEST = len(SPECIAL) + 256


def _splitter() -> pre_tokenizers.Sequence:
    """Return the pre-tokenizer that cuts text into words and spells them in bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Pieces:
    """Learn a vocabulary and its merges from texts.

    Args:
        texts: prompts and answers as they are, without a chat template.
        vocab_size: number of pieces, counting the 256 bytes and the 4 special tokens.

    Returns:
        The tokenizer, without a chat template.

    Raises:
        ConfigError: ``vocab_size`` is smaller than bytes and special tokens together, or there is no text.
    """
    if vocab_size < _SMALLEST:
        raise ConfigError(f"vocab_size {vocab_size} is less than the {_SMALLEST} bytes and special tokens")
    splitter = _splitter()
    words = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(text))
    if not words:
        raise ConfigError("there is no text to learn a tokenizer from")
    vocab, merges = _core(words, max(_SMALLEST, int(vocab_size * _CORE_SHARE)))
    _attach_prefixes(words, vocab, merges, vocab_size)
    pieces = Pieces(models.BPE(vocab=vocab, merges=merges))
    pieces.pre_tokenizer = splitter
    pieces.decoder = decoders.ByteLevel()
    pieces.add_special_tokens(list(SPECIAL))
    return pieces


def save_bpe(pieces: Pieces, folder: str | Path, max_positions: int, *, is_chat: bool = True) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and, with ``is_chat``, the chat template.

    Raises:
        CheckpointError: the folder cannot be written; it is left as it was.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [USER, ASSISTANT],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    with staged(folder) as staging:
        (staging / "tokenizer.json").write_text(pieces.to_str(pretty=False), encoding="utf-8")
        (staging / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if is_chat:
            (staging / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def spelling(piece: str) -> tuple[str, str, str]:
    """Split a piece into (prefix, letters in lower case, case), where case is "lower", "upper", "title" or "none".

    Pieces that differ only in prefix or case have the same letters, so their embeddings can start from the same vector.
    """
    prefix, core = "", piece
    if len(piece) > 1 and piece[0] in _PREFIXES and piece not in SPECIAL:
        prefix, core = piece[0], piece[1:]
    if core.islower():
        case = "lower"
    elif core.isupper() and len(core) > 1:
        case = "upper"
    else:
        case = "title" if core[:1].isupper() else "none"
    return prefix, core.lower(), case


def _bare(word: str) -> str:
    """Return a word without its leading space or underscore."""
    return word[1:] if len(word) > 1 and word[0] in _PREFIXES else word


def _core(words: Counter[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learn pieces and merges from the words without their prefix."""
    bare: Counter[str] = Counter()
    for word, count in words.items():
        bare[_bare(word)] += count
    learner = Pieces(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    repeated = (word for word, count in bare.items() for _ in range(min(count, _COUNT_CAP)))
    learner.train_from_iterator(repeated, trainer)
    model = json.loads(learner.to_str())["model"]
    return dict(model["vocab"]), [(first, second) for first, second in model["merges"]]


def _attach_prefixes(
    words: Counter[str], vocab: dict[str, int], merges: list[tuple[str, str]], vocab_size: int
) -> None:
    """Fill the rest of the vocabulary with prefix + first piece of a word, the most frequent first."""
    cutter = Pieces(models.BPE(vocab=vocab, merges=merges))
    firsts: Counter[tuple[str, str]] = Counter()
    for word, count in words.items():
        if _bare(word) != word:
            firsts[word[0], cutter.encode(word[1:]).tokens[0]] += count
    for (prefix, piece), _ in firsts.most_common():
        if len(vocab) >= vocab_size:
            break
        if prefix + piece not in vocab:
            vocab[prefix + piece] = len(vocab)
            merges.append((prefix, piece))
