"""The picture of the rooms: one box per room, on the floor that the architecture test assigns to it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from html import escape
from pathlib import Path

WIDTH, MARGIN, LABEL, GAP = 1000, 12, 70, 10
LINE, PADDING = 15, 10
CHARACTER = 6.3
"""Width of a character of the small text, in pixels."""


def rooms(package: Path, floors: Mapping[str, int]) -> dict[int, dict[str, str]]:
    """Return the purpose of each existing room by floor; ``__init__`` and ``__main__`` of the package are left out."""
    found: dict[int, dict[str, str]] = {}
    for name, floor in floors.items():
        sources = [path for path in (package / name / "__init__.py", package / f"{name}.py") if path.is_file()]
        if sources and not name.startswith("__"):
            found.setdefault(floor, {})[name] = purpose(sources[0])
    return found


def purpose(source: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].replace("``", "").split())


def draw(floors: Mapping[int, Mapping[str, str]]) -> str:
    """Return the picture as SVG, with the top floor first."""
    parts: list[str] = []
    y = MARGIN
    for floor in sorted(floors, reverse=True):
        boxes = list(floors[floor].items())
        width = (WIDTH - LABEL - MARGIN - GAP * (len(boxes) - 1)) / len(boxes)
        wrapped = [textwrap.wrap(text, int((width - 2 * PADDING) / CHARACTER)) for _, text in boxes]
        height = 2 * PADDING + 18 + LINE * max(map(len, wrapped))
        parts.append(f'<text class="floor" x="{MARGIN}" y="{y + height / 2 + 4:.0f}">floor {floor}</text>')
        for place, ((name, _), lines) in enumerate(zip(boxes, wrapped, strict=True)):
            parts.append(_box(LABEL + place * (width + GAP), y, width, height, name, lines))
        y += height + GAP
    return "\n".join([_head(y), *parts, "</svg>", ""])


def _head(height: int) -> str:
    """Return the beginning of the SVG file."""
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"
     aria-label="Rooms of vivace by floor; imports point down">
<style>
  text {{ font-family: system-ui, sans-serif; font-size: 12px; fill: #24292f }}
  .name {{ font-size: 14px; font-weight: 600 }}
  .floor {{ fill: #6e7781 }}
  rect {{ fill: #f6f8fa; stroke: #8c959f }}
</style>
<rect x="0" y="0" width="{WIDTH}" height="{height}" style="fill: #ffffff; stroke: none"/>"""


def _box(x: float, y: float, width: float, height: float, name: str, lines: list[str]) -> str:
    """Return one box with the name of a room and the lines of its purpose."""
    left = x + PADDING
    text = [f'<text class="name" x="{left:.1f}" y="{y + PADDING + 12:.0f}">{escape(name)}</text>']
    text += [
        f'<text x="{left:.1f}" y="{y + PADDING + 30 + LINE * place:.0f}">{escape(line)}</text>'
        for place, line in enumerate(lines)
    ]
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" rx="5"/>\n' + "\n".join(text)
