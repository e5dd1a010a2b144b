"""Blocks of rows get the texts of the engine, as a program with rows in columns calls it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import vivace
from tests.test_encoder_decoders import SOURCES, make
from vivace.batch.blocks import Answers
from vivace.errors import ConfigError


def test_columns_of_answers(tmp_path: Path) -> None:
    folder = make(tmp_path, "t5")
    answers = Answers(str(folder), column="source", num_beams=3, max_new_tokens=8)
    block = {"source": np.array(SOURCES, dtype=object), "id": np.arange(len(SOURCES))}
    found = answers(block)
    wanted = vivace.load(folder).generate(SOURCES, num_beams=3, max_new_tokens=8)
    assert found["text"] == [result.text for result in wanted]
    assert found["score"] == [result.score for result in wanted]
    assert found["id"] is block["id"]
    assert "score" not in Answers(str(folder), num_beams=1, max_new_tokens=4)({"prompt": SOURCES[:1]})
    with pytest.raises(ConfigError, match="no column 'source'"):
        answers({"prompt": SOURCES})
    with pytest.raises(ConfigError, match="row 1 of a block"):
        answers({"source": ["a", 3]})
    with pytest.raises(ConfigError, match="row 1 of a block has an empty text"):
        answers({"source": ["a", " \n"]})
    with pytest.raises(ConfigError, match="num_beam"):
        Answers(str(folder), num_beam=3)


def test_other_texts_of_a_search_have_a_column_and_prompts_keep_theirs(tmp_path: Path) -> None:
    folder = make(tmp_path, "t5")
    search = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    found = Answers(str(folder), column="text", answer="summary", **search)({"text": SOURCES})
    wanted = vivace.load(folder).generate(SOURCES, **search)
    assert found["text"] is SOURCES
    assert found["summary"] == [result.text for result in wanted]
    assert found["alternatives"] == [[result.alternatives[0].text] for result in wanted]
    with pytest.raises(ConfigError, match="name another column"):
        Answers(str(folder), column="text")
    with pytest.raises(ConfigError, match="name another column"):
        Answers(str(folder), answer="score")
