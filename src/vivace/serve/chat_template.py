"""Which values a chat template uses, and which fields of messages it reads, found in its source.

A template is a program of the checkpoint. A variable of it *holds messages* when it is ``messages`` itself, or when a
loop, an assignment or the argument of a macro gives it a part of what another such variable holds. The fields that are
read are the attributes and items of these variables whose names stand in the source. Scopes are not told apart, so a
field may be called read that is not; one that is read is not missed.
"""

from __future__ import annotations

from collections.abc import Iterator

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from vivace.checkpoint.tokenizer import Tokenizer

EVERY = "*"
"""Stands for all fields, where a template writes messages as a whole."""
_NEIGHBOURS = ("previtem", "nextitem")
"""Attributes of ``loop`` that are what the loop goes over."""
_WHOLE = frozenset({"tojson", "string", "items", "dictsort", "values", "keys"})
"""Filters and methods that read every field of a message."""


class _Generation(Extension):
    """The tag of transformers around what the assistant writes; here it is only what stands inside."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def parsed(tokenizer: Tokenizer) -> nodes.Template:
    """Return the syntax tree of a tokenizer's chat template; an empty one where there is none that can be read."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    template = tokenizer.inner.chat_template
    try:
        return environment.parse(template if isinstance(template, str) else "")
    except jinja2.TemplateSyntaxError:  # what cannot be read is not promised
        return environment.parse("")


def template_words(template: nodes.Template) -> frozenset[str]:
    """Return the names of the values that a chat template uses."""
    return frozenset(meta.find_undeclared_variables(template))


def message_fields(template: nodes.Template) -> frozenset[str]:
    """Return the names of the fields of messages that a chat template reads, ``EVERY`` among them if it is all."""
    holders: frozenset[str] = frozenset({"messages"})
    while (more := holders | _Holders(holders).given(template)) != holders:
        holders = more
    return frozenset(_Holders(holders).read(template))


class _Holders:
    """The variables of a template that hold messages, as far as they are known."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def holds(self, node: nodes.Node | None) -> bool:
        """Return whether an expression gives messages: one, or several of them."""
        if isinstance(node, nodes.Name):
            return node.name in self._names
        if isinstance(node, nodes.Getattr):
            return _dotted(node) in self._names or (_dotted(node.node) == "loop" and node.attr in _NEIGHBOURS)
        if isinstance(node, nodes.Getitem):
            return self.holds(node.node) and _text(node.arg) is None
        if isinstance(node, nodes.Filter):
            return node.name != "map" and self.holds(node.node)
        if isinstance(node, nodes.BinExpr):
            return self.holds(node.left) or self.holds(node.right)
        if isinstance(node, nodes.List):
            return any(map(self.holds, node.items))
        return isinstance(node, nodes.CondExpr) and (self.holds(node.expr1) or self.holds(node.expr2))

    def given(self, template: nodes.Template) -> set[str]:
        """Return the names of variables that are given messages."""
        found: set[str] = set()
        for loop in template.find_all(nodes.For):
            if self.holds(loop.iter):
                found.add(_dotted(loop.target))
        for assign in template.find_all(nodes.Assign):
            if self.holds(assign.node):
                found.add(_dotted(assign.target))
            if isinstance(assign.node, nodes.Call):  # a namespace
                found |= {f"{_dotted(assign.target)}.{one.key}" for one in assign.node.kwargs if self.holds(one.value)}
        macros = {macro.name: macro.args for macro in template.find_all(nodes.Macro)}
        for call in template.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr == "append" and any(map(self.holds, call.args)):
                found.add(_dotted(call.node.node))
            parameters = macros.get(_dotted(call.node), [])
            found |= {name.name for name, value in zip(parameters, call.args, strict=False) if self.holds(value)}
            found |= {one.key for one in call.kwargs if parameters and self.holds(one.value)}
        return found - {""}

    def read(self, template: nodes.Template) -> Iterator[str]:
        """Yield the names of the fields that are read."""
        methods = set()
        for call in template.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and self.holds(call.node.node):
                methods.add(id(call.node))
                yield from (EVERY,) if call.node.attr in _WHOLE else filter(None, map(_text, call.args[:1]))
        for field in template.find_all(nodes.Getattr):
            if self.holds(field.node) and id(field) not in methods:
                yield field.attr
        for item in template.find_all(nodes.Getitem):
            if self.holds(item.node):
                yield from filter(None, (_text(item.arg),))
        for compare in template.find_all(nodes.Compare):
            if any(self.holds(operand.expr) for operand in compare.ops):
                yield from filter(None, (_text(compare.expr),))
        for one in template.find_all(nodes.Filter):
            if self.holds(one.node):
                values = [*one.args, *(keyword.value for keyword in one.kwargs)]
                yield from (EVERY,) if one.name in _WHOLE else filter(None, map(_text, values))
        for output in template.find_all(nodes.Output):
            yield from (EVERY for node in output.nodes if self.holds(node))


def _dotted(node: nodes.Node) -> str:
    """Return the name of a variable, or of a variable in a namespace; nothing for other expressions."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return ""


def _text(node: nodes.Node) -> str | None:
    """Return the value of a constant text; None for other expressions."""
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None
