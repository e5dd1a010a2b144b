"""Exact match of generated SQL with its references.

Two queries are equal if they are equal after this normalisation, which removes only differences that the WikiSQL
release itself makes inconsistently: case (values are sometimes the question's, sometimes the table's), white space,
double quotes around a value (present for several words, mostly absent for one) and a closing semicolon. Columns,
aggregates, operators, values and the order of conditions all have to be right; no query is executed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_OPERATOR = re.compile(r"\s*(<=|>=|!=|=|<|>)\s*")


def normalise_sql(query: str) -> str:
    """Return the form in which queries are compared."""
    plain = query.strip().removesuffix(";").replace('"', " ").casefold()
    return " ".join(_OPERATOR.sub(r" \1 ", plain).split())


def is_exact_match(query: str, references: Sequence[str]) -> bool:
    """Return whether a query equals one of its references."""
    return normalise_sql(query) in {normalise_sql(reference) for reference in references}
