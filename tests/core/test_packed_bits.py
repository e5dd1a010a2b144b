"""The bit tests of decoding once more, on packed decoders: every variant, every native body."""

from __future__ import annotations

import pytest
import torch

from tests.core.decoders import OF_NORMS_AND_PLACES, VARIANTS, build
from tests.core.test_bits import (  # noqa: F401 - collected here with this file's decoder
    test_alone_and_among_sixteen,
    test_chains_of_any_length_are_single_rows,
    test_chunks_of_a_prompt_do_not_see_each_other,
    test_tree_nodes_are_chain_rows,
)
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.kernels.native import NativeBody

pytestmark = pytest.mark.slow_where(
    lambda decoder, dtype, **_: dtype == torch.float32 and decoder in OF_NORMS_AND_PLACES
)


@pytest.fixture(params=sorted(VARIANTS))
def decoder(request: pytest.FixtureRequest, body: NativeBody, dtype: torch.dtype) -> Decoder:
    made = build(request.param, dtype)
    pack_decoder(made, body)
    return made
