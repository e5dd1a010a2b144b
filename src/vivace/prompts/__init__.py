"""Prompt files with one JSON object per line, and the sets that come with the package.

``e2e.jsonl`` and ``sql.jsonl`` beside this file are the project's own, made by ``tools/make_prompts.py``.
"""

from vivace.prompts.records import PACKAGED, Message, Prompt, load_prompts, packaged_prompts, save_prompts

__all__ = ["PACKAGED", "Message", "Prompt", "load_prompts", "packaged_prompts", "save_prompts"]
