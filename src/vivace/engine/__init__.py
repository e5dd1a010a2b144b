"""Loading a checkpoint into an engine that answers prompts: the interface for Python.

In four lines:

    engine = vivace.load("path/or/hub-id")
    result = engine.generate("Describe: name[Green Man], food[Indian]")[0]
    for chunk in engine.stream("Describe: name[Green Man], food[Indian]"):
        print(chunk.text, end="")
"""

from __future__ import annotations

from vivace.answer import Chunk as Chunk
from vivace.answer import Result as Result
from vivace.engine.engine import EXACT_ROWS as EXACT_ROWS
from vivace.engine.engine import Engine as Engine
from vivace.engine.opening import SHIPPED as SHIPPED
from vivace.engine.opening import load as load
from vivace.engine.prompts import Prompt as Prompt
from vivace.options import Options as Options
