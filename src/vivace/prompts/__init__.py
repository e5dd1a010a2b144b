"""Prompt files with one JSON object per line, and the sets that come with the package.

``e2e.jsonl`` and ``sql.jsonl`` beside this file are the project's own, made by ``tools/make_prompts.py``;
``chat.jsonl`` was written by hand.
"""

from vivace.prompts.records import (
    PACKAGED,
    TASKS,
    Asked,
    Message,
    Prompt,
    is_unicode,
    load_prompts,
    load_text,
    packaged_prompts,
    save_prompts,
)

__all__ = [
    "PACKAGED",
    "TASKS",
    "Asked",
    "Message",
    "Prompt",
    "is_unicode",
    "load_prompts",
    "load_text",
    "packaged_prompts",
    "save_prompts",
]
