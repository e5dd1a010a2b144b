"""Fields that templates read are found however they read them, and those of other things are not taken for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.serve.chat_template import EVERY, message_fields, parsed, template_words


def fields(template: str | None) -> set[str]:
    return set(message_fields(parsed(Tokenizer(SimpleNamespace(chat_template=template, eos_token_id=None)))))


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{% for m in messages %}{{ m.role }}{{ m['content'] }}{% endfor %}", {"role", "content"}),
        ("{{ messages[0]['role'] + messages[-1].content }}", {"role", "content"}),
        ("{% set rest = messages[1:] %}{% for m in rest %}{{ m.content }}{% endfor %}", {"content"}),
        ("{% set few = messages[1:] if messages[0].role == 'system' else messages %}{{ few[0].a }}", {"role", "a"}),
        ("{% for m in messages %}{% set n = m %}{% set m = n %}{{ m.get('name') }}{% endfor %}", {"name"}),
        ("{% set kept = [] %}{% for m in messages %}{% set kept = kept + [m] %}{% endfor %}{{ kept[0].a }}", {"a"}),
        ("{% set kept = [] %}{% for m in messages %}{% set _ = kept.append(m) %}{% endfor %}{{ kept[0].a }}", {"a"}),
        ("{% set ns = namespace(last=messages[-1]) %}{{ ns.last.name }}", {"name"}),
        ("{% set ns = namespace() %}{% set ns.last = messages[-1] %}{{ ns.last.name }}", {"name"}),
        ("{% for m in messages %}{{ loop.previtem.role }}{% endfor %}", {"role"}),
        ("{% macro told(one, more) %}{{ one.name }}{% endmacro %}{{ told(messages[0], 1) }}", {"name"}),
        ("{% macro told(one) %}{{ one.name }}{% endmacro %}{{ told(one=messages[0]) }}", {"name"}),
        ("{% macro told(tool) %}{{ tool.name }}{% endmacro %}{{ told(tools[0]) }}", set()),
        ("{% for m in messages if 'tool_calls' in m %}x{% endfor %}", {"tool_calls"}),
        ("{% for m in messages | rejectattr('tool_calls') | list %}{{ m.content }}{% endfor %}",
         {"tool_calls", "content"}),
        ("{{ (messages | map(attribute='content') | list)[0] }}", {"content"}),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% if c.function %}{% set c = c.function %}{% endif %}"
         "{{ c.name }}{{ c.id }}{% endfor %}{% endfor %}", {"tool_calls"}),
        ("{% for t in tools %}{{ t.name }}{% endfor %}{{ messages[0].content }}", {"content"}),
        ("{% for m in messages %}{% generation %}{{ m.thought }}{% endgeneration %}{% endfor %}", {"thought"}),
        ("{% for m in messages %}{% if m.stop %}{% break %}{% endif %}{% endfor %}", {"stop"}),
        ("{{ messages | tojson }}", {EVERY}),
        ("{% for m in messages %}{{ m }}{% endfor %}", {EVERY}),
        ("{% for m in messages %}{% for key, value in m.items() %}{{ key }}{% endfor %}{% endfor %}", {EVERY}),
        ("{% unknown %}", set()),
        (None, set()),
    ],
)  # fmt: skip
def test_the_fields_that_a_template_reads(template: str | None, read: set[str]) -> None:
    assert fields(template) == read


def test_values_inside_of_a_generation_are_used() -> None:
    template = "{% generation %}{{ thinking }}{% endgeneration %}{{ tools }}"
    inner = SimpleNamespace(chat_template=template, eos_token_id=None)
    assert template_words(parsed(Tokenizer(inner))) == {"thinking", "tools"}
