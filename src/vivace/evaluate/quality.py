"""Quality of generated texts, by the metrics that fit their tasks.

Texts with references get BLEU and ROUGE-L; *e2e* also gets the slot error rate, which only needs the prompt;
*wikisql* and *advising* get exact match instead of the overlap metrics.
"""

from __future__ import annotations

from collections.abc import Sequence

from vivace.errors import ConfigError
from vivace.evaluate.overlap import bleu, rouge_l
from vivace.evaluate.slots import total_slot_errors
from vivace.evaluate.sql import is_exact_match
from vivace.prompts import Prompt

SQL_TASKS = ("wikisql", "advising")
"""Tasks whose answers are SQL queries."""


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
