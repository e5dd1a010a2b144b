"""Quality of generated texts, by the metrics that fit their tasks.

Texts with references get BLEU and ROUGE-L; *e2e* also gets the slot error rate, which only needs the prompt;
*wikisql* and *advising* get exact match instead of the overlap metrics, *clinc* the share of right intents, and *snips*
what is usual for intents and slots (``frames.py``). Questions about long prompts (*multidoc*,
*kv*, *reading*) get the share of answers that contain a reference, and the F1 of the words of the best one (as in
Rajpurkar et al. 2016, arXiv:1606.05250, without their list of articles).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from vivace.errors import ConfigError
from vivace.evaluate.frames import frame_scores
from vivace.evaluate.overlap import bleu, rouge_l
from vivace.evaluate.slots import total_slot_errors
from vivace.evaluate.sql import is_exact_match
from vivace.prompts import Prompt

SQL_TASKS = ("wikisql", "advising")
"""Tasks whose answers are SQL queries."""
QUESTION_TASKS = ("multidoc", "kv", "reading")
"""Tasks whose answers are a few words of a long prompt."""


def normalised(text: str) -> str:
    """Return a text without case, punctuation and double spaces."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


def contains(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text contains one of the answers, in whole words, without case and punctuation."""
    said = f" {normalised(text)} "
    return any(f" {normalised(answer)} " in said for answer in answers)


def word_f1(text: str, answer: str) -> float:
    """Return the harmonic mean of the shares of words that a text and an answer have in common."""
    said, wanted = Counter(normalised(text).split()), Counter(normalised(answer).split())
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0


def score(prompts: Sequence[Prompt], texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Compute the metrics of each task among the prompts.

    Args:
        prompts: the prompts, with references and task names.
        texts: the answers, in the same order.

    Returns:
        ``{task: {metric: value}}``; prompts without a task are under ``"text"``. Shares are between 0 and 1, BLEU
        and ROUGE-L between 0 and 100, and ``num_texts`` is a count.

    Raises:
        ConfigError: the lengths differ.
        DependencyError: BLEU and ROUGE-L are needed and the extra ``bench`` is not installed.
    """
    if len(prompts) != len(texts):
        raise ConfigError(f"{len(prompts)} prompts, but {len(texts)} texts to score")
    groups: dict[str, list[tuple[Prompt, str]]] = {}
    for prompt, text in zip(prompts, texts, strict=True):
        groups.setdefault(prompt.task or "text", []).append((prompt, text))
    return {task: _score_task(task, pairs) for task, pairs in groups.items()}


def _score_task(task: str, pairs: Sequence[tuple[Prompt, str]]) -> dict[str, float]:
    """Compute the metrics of one task."""
    values: dict[str, float] = {"num_texts": len(pairs)}
    answered = [(text, prompt.references) for prompt, text in pairs if prompt.references]
    if answered and task in SQL_TASKS:
        values["exact_match"] = sum(is_exact_match(text, answers) for text, answers in answered) / len(answered)
    elif answered and task == "clinc":
        values["exact_match"] = sum(text.strip() in answers for text, answers in answered) / len(answered)
    elif answered and task == "snips":
        values |= frame_scores([text for text, _ in answered], [answers[0] for _, answers in answered])
    elif answered and task in QUESTION_TASKS:
        values["contains"] = sum(contains(text, answers) for text, answers in answered) / len(answered)
        values["f1"] = sum(max(word_f1(text, answer) for answer in answers) for text, answers in answered) / len(
            answered
        )
    elif answered:
        texts, references = zip(*answered, strict=True)
        values["bleu"] = bleu(texts, references)
        values["rouge_l"] = sum(rouge_l(texts, references)) / len(answered)
    if task == "e2e":
        errors = total_slot_errors([str(prompt.request) for prompt, _ in pairs], [text for _, text in pairs])
        values["slot_error_rate"] = errors.rate
        values["num_slots"] = errors.num_slots
        values["num_slots_wrong"] = errors.num_wrong
        values["num_slots_missing"] = errors.num_missing
        values["num_slots_added"] = errors.num_added
    return values
