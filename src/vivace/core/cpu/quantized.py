"""Copies of packed matrices in fewer bits, which only drafts are multiplied by.

Rounding a large model takes seconds while nothing is written, so it is logged; commands show that as notes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from vivace.kernels.grid_codes import GridCodes
from vivace.kernels.low_bit import LowBit, Weights, quantise
from vivace.kernels.native import Matrix
from vivace.kernels.palette import IntPalette, Palette

log = logging.getLogger(__name__)

SLOW_WEIGHTS = 2**24
"""Number of weights whose rounding takes long enough to be said (about a second on one core)."""


def quantized_copy(part: object, weights: Weights, made: LowBit | None = None, *, always: bool = False) -> Matrix:
    """Return a quantized copy of a packed projection's matrix, or the matrix itself where it has few bits already.

    A copy that was ``made`` before is taken as it is. With ``always`` codes of a file are rounded, too: the gate and
    the up projection of a feed-forward read one quantized input, so that both have to be in one format.
    """
    assert isinstance(part, nn.Module)
    matrix = part.matrix
    assert isinstance(matrix, Matrix)
    if made is not None:
        return Matrix(made, matrix.bias, matrix.in_width, matrix.out_width)
    if weights == "bf16" or not (always or is_rounded(matrix, weights)):
        return matrix
    if weights == "int8" and matrix.screen is not None:  # the screen is that copy
        return Matrix(matrix.screen.codes, matrix.bias, matrix.in_width, matrix.out_width)
    return Matrix(quantise(matrix.rows_of_weights(), weights), matrix.bias, matrix.in_width, matrix.out_width)


def quantized_head(part: object, weights: Weights) -> Matrix:
    """Return a quantized copy of a head for guesses, and log that it is made if it has many weights."""
    if weights != "bf16":
        tell_rounding("the head", [part], weights)
    return quantized_copy(part, weights)


def tell_rounding(what: str, parts: Iterable[object], weights: Weights) -> None:
    """Log that copies of these packed projections are made now, which takes seconds if they have many weights."""
    matrices = [matrix for part in parts if isinstance(matrix := getattr(part, "matrix", None), Matrix)]
    count = sum(
        matrix.in_width * matrix.out_width
        for matrix in matrices
        if is_rounded(matrix, weights) and not (weights == "int8" and matrix.screen is not None)
    )
    level = logging.INFO if count >= SLOW_WEIGHTS else logging.DEBUG
    log.log(level, "rounding %s weights of %s to %s for drafts", f"{count:,}", what, weights)


def is_rounded(matrix: Matrix, weights: Weights) -> bool:
    """Return whether a copy in a format takes less memory than a matrix; a file's codes may take no more."""
    if isinstance(matrix.weight, LowBit | Palette | IntPalette):
        return False
    return not (isinstance(matrix.weight, GridCodes) and (matrix.weight.format == "grid4" or weights == "int8"))
