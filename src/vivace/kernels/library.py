"""The compiled library and its structs (``native/abi.h``), as ctypes describes them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from vivace.errors import DependencyError
from vivace.kernels.build import LIBRARY, fingerprint

FEATURES = {"avx2": 1, "avx512": 2, "amx": 4}
"""Bits of the result of ``vivace_features``, by the kernels that can run. Its first call asks the system for the tile
registers of AMX."""

BODIES = {"avx2": 0, "avx512": 1, "amx": 3}
"""Indices of the kernels in the library, from the slowest to the fastest."""
FLOAT32_BODIES = {"avx2": 4, "avx512": 5, "amx": 5}
"""Indices of the kernels for float32 weights; the tiles of AMX do not multiply float32."""
AVX2_WITHOUT_VNNI = 2
"""Index of the AVX2 kernels for processors without VNNI; the library chooses them itself, tests name them."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
SITES = {"q": 0, "k": 1, "v": 2, "o": 3, "gate": 4, "up": 5, "down": 6, "mlp": 7}
FORMATS = {
    **{"row_major": 0, "tiles": 1, "int8": 2, "q4": 3, "lut4": 4, "exact12": 5, "exact12_rows": 6},
    **{"float16_tiles": 7, "float16_rows": 8, "bfloat16_tiles": 9, "bfloat16_rows": 10},
    **{"lut2": 11, "lut3": 12, "lut2_ints": 13, "lut3_ints": 14, "lut4_ints": 15, "grid4": 16, "grid8": 17},
}
LANES = 16
"""Number of outputs in a tile of a packed matrix: the float32 numbers of a 512-bit register."""
GROUP = 64
"""Number of neighbouring inputs that share a scale in integer products."""


class CMatrix(Structure):
    """Mirrors ``Matrix``: weights in one of the layouts of ``FORMATS``."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("in_width", c_int64),
        ("out_width", c_int64),
        ("format", c_int64),
        ("scales", c_void_p),
        ("table", c_void_p),
        ("screen", c_void_p),
    ]


class CScreen(Structure):
    """Mirrors ``Screen``: a matrix in fewer bits, with bounds for what the rounding changed."""

    _fields_ = [("codes", CMatrix), ("lost", c_void_p), ("kept", c_void_p), ("counts", c_void_p)]


class CGain(Structure):
    """Mirrors ``Gain``: the weight and bias of a norm; both null for no norm."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class CLinear(Structure):
    """Mirrors ``Linear``: a projection of rows."""

    _fields_ = [("matrix", CMatrix), ("x", c_void_p), ("add", c_void_p), ("out", c_void_p), ("rows", c_int64)]


class CGated(Structure):
    """Mirrors ``Gated``: gate and up projections of rows with their activation."""

    _fields_ = [
        ("gate", CMatrix),
        ("up", CMatrix),
        ("x", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("activation", c_int64),
    ]


class CActivated(Structure):
    """Mirrors ``Activated``: the activation of a feed-forward."""

    _fields_ = [
        ("gate", c_void_p),
        ("up", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
        ("activation", c_int64),
    ]


class CNeurons(Structure):
    """Mirrors ``Neurons``: the contribution of some neurons of a gated feed-forward."""

    _fields_ = [
        *((name, c_void_p) for name in ("gate", "up", "down", "known", "x", "inner", "out")),
        *((name, c_int64) for name in ("rows", "count", "width", "stride", "activation")),
    ]


class CNorm(Structure):
    """Mirrors ``Norm``: a norm of rows."""

    _fields_ = [
        ("x", c_void_p),
        ("gain", CGain),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("eps", c_float),
        ("offset", c_float),
    ]


class CQuantised(Structure):
    """Mirrors ``Quantised``: the quantization of a matrix to q4."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "table", "codes", "scales")),
        ("rows", c_int64),
        ("in_width", c_int64),
    ]


class CClustering(Structure):
    """Mirrors ``Clustering``: soft clustering of tiles of weights, or its gradient."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "tau", "centroids", "totals", "clustered", "given", "gradient")),
        *((name, c_int64) for name in ("tiles", "count", "entries", "rounds")),
    ]


class CPlaces(Structure):
    """Mirrors ``Places``: where the entries of slots are stored."""

    _fields_ = [
        ("table", c_void_p),
        *((name, c_int64) for name in ("table_width", "block", "capacity")),
        *((name, c_void_p) for name in ("key_scales", "value_scales", "pruned")),
    ]


class CAttention(Structure):
    """Mirrors ``Attention``: queries of single rows and the entries they read."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "keys", "values")),
        ("places", CPlaces),
        *((name, c_void_p) for name in ("slot", "seen", "tail", "index", "out", "sums")),
        *((name, c_int64) for name in ("rows", "q_stride", "heads", "kv_heads", "width", "tail_width", "index_width")),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("bias", c_void_p),
        ("bias_reach", c_int64),
    ]


class CExpert(Structure):
    """Mirrors ``Expert``: the gated feed-forward of an expert."""

    _fields_ = [(name, CMatrix) for name in ("gate", "up", "down")]


class CMixture(Structure):
    """Mirrors ``Mixture``: the experts of a layer and their router."""

    _fields_ = [
        ("router", CMatrix),
        ("experts", POINTER(CExpert)),
        ("top_k", c_int64),
        ("normalises", c_int64),
    ]


class CLayer(Structure):
    """Mirrors ``Layer``: the weights of a layer in a span."""

    _fields_ = [
        *((name, CMatrix) for name in ("qkv", "o", "gate", "up", "down")),
        *((name, CGain) for name in ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm")),
        *((name, CGain) for name in ("q_norm", "k_norm")),
        ("window", c_int64),
        ("rope", c_int64),
        ("mixture", POINTER(CMixture)),
        *((name, CMatrix) for name in ("cross_q", "cross_o")),
        *((name, CGain) for name in ("cross_norm", "cross_post_norm")),
    ]


class CPlan(Structure):
    """Mirrors ``Plan``: the layers of a span and the sizes they share."""

    _fields_ = [
        ("layers", POINTER(CLayer)),
        *((name, c_int64) for name in ("num_layers", "heads", "kv_heads", "width", "ffn_width", "head_width")),
        *((name, c_int64) for name in ("rotated", "activation", "is_gated", "norms_heads_alone")),
        *((name, c_float) for name in ("norm_eps", "norm_offset", "scale", "softcap", "clip")),
        *((name, c_int64) for name in ("norms_sums", "reads_sources")),
        ("bias", c_void_p),
        ("bias_reach", c_int64),
    ]


class CDelta(Structure):
    """Mirrors ``Term``: low-rank deltas at one site of one layer."""

    _fields_ = [
        *((name, c_int64) for name in ("layer", "site", "rank", "in_width", "out_width")),
        *((name, c_void_p) for name in ("down", "up", "which")),
    ]


class LayerPart(IntEnum):
    """Mirrors ``LayerPart``: what a call computes of a layer."""

    WHOLE = 0
    PROJECTED = 1
    """Up to its stored keys and values."""
    BEHIND = 2
    """What is behind them."""
    ATTENDED = 3
    """The attention's output projection, without residual and norm."""
    FED = 4
    """The feed-forward, likewise."""


class CCall(Structure):
    """Mirrors ``Call``: the rows that go through a span of layers."""

    _fields_ = [
        *((name, c_void_p) for name in ("h", "out", "slot", "seen", "tail", "index", "entry")),
        *((name, POINTER(c_void_p)) for name in ("keys", "values", "cosines", "sines")),
        ("places", POINTER(CPlaces)),
        ("deltas", POINTER(CDelta)),
        ("space", c_void_p),
        *((name, c_int64) for name in ("start", "stop", "rows", "num_write", "num_feed")),
        *((name, c_int64) for name in ("tail_width", "index_width", "num_deltas")),
        *((name, POINTER(c_void_p)) for name in ("cross_keys", "cross_values")),
        ("cross_places", POINTER(CPlaces)),
        ("cross_seen", c_void_p),
        ("part", c_int64),
        ("heads", c_void_p),
    ]


class CChoice(Structure):
    """Mirrors ``Choice``: the routing of rows to experts."""

    _fields_ = [
        ("router", CMatrix),
        *((name, c_void_p) for name in ("x", "chosen", "weights")),
        *((name, c_int64) for name in ("rows", "top_k", "normalises")),
    ]


class CMix(Structure):
    """Mirrors ``Mix``: the weighted sum of experts' outputs."""

    _fields_ = [
        ("parts", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("weights", "add", "out")),
        *((name, c_int64) for name in ("rows", "count", "width", "stride")),
    ]


class CRouters(Structure):
    """Mirrors ``Routers``: routers of several layers, applied to one row each."""

    _fields_ = [
        *((name, c_void_p) for name in ("fast", "slow", "scale", "slow_scale", "weight", "out")),
        *((name, c_int64) for name in ("count", "width", "experts", "chosen")),
    ]


class CWireCode(Structure):
    """Mirrors ``WireCode``: how the rows of one sum over ranks travel in four bits."""

    _fields_ = [
        *((name, c_void_p) for name in ("keep", "rest", "scales", "inverses", "weights", "factors", "inverse_factors")),
        *((name, c_int64) for name in ("width", "num_keep", "num_rest", "row_bytes")),
    ]


class CWireRows(Structure):
    """Mirrors ``WireRows``: rows that are encoded, or added."""

    _fields_ = [
        ("code", POINTER(CWireCode)),
        ("x", c_void_p),
        ("payload", c_void_p),
        *((name, c_int64) for name in ("count", "is_float", "source")),
    ]


class CExtent(Structure):
    """Mirrors ``Extent``: a part of a file and its place in memory."""

    _fields_ = [(name, c_int64) for name in ("offset", "place", "bytes")]


class CEnded(Structure):
    """Mirrors ``Ended``: the end of a read, with its error number if it failed."""

    _fields_ = [(name, c_int64) for name in ("number", "error", "offset", "bytes")]


class CDrawing(Structure):
    """Mirrors ``Drawing``: how the tokens of a text are drawn."""

    _fields_ = [("key", c_int64), ("scale", c_float), ("top_p", c_float)]


ENDED = -1
"""Error of a read beyond the end of its file."""
DAMAGED = -2
"""Error of a read in which a page does not have its checksum."""

SIGNATURES: dict[str, tuple[object, ...]] = {
    "vivace_linear": (c_int64, c_int64, POINTER(CLinear)),
    "vivace_gated": (c_int64, c_int64, POINTER(CGated)),
    "vivace_greedy": (c_int64, c_int64, POINTER(CLinear), c_void_p, c_void_p),
    "vivace_draw": (c_int64, c_void_p, c_int64, c_void_p, POINTER(CDrawing), c_int64, POINTER(c_float)),
    "vivace_activate": (c_int64, POINTER(CActivated)),
    "vivace_neurons": (c_int64, c_int64, POINTER(CNeurons)),
    "vivace_norm": (c_int64, POINTER(CNorm)),
    "vivace_attention": (c_int64, c_int64, POINTER(CAttention)),
    "vivace_rows": (POINTER(CMatrix), c_void_p, c_int64, c_void_p),
    "vivace_quantise": (c_int64, c_int64, POINTER(CQuantised)),
    "vivace_cluster": (c_int64, c_int64, POINTER(CClustering)),
    "vivace_span": (c_int64, c_int64, POINTER(CPlan), POINTER(CCall)),
    "vivace_feed": (c_int64, c_int64, POINTER(CGated), POINTER(CLinear)),
    "vivace_choose": (c_int64, c_int64, POINTER(CChoice)),
    "vivace_mix": (POINTER(CMix),),
    "vivace_foresee": (POINTER(CRouters),),
    "vivace_wire_encode": (POINTER(CWireRows), c_void_p),
    "vivace_wire_add": (POINTER(CWireRows), POINTER(c_void_p), c_int64, c_void_p),
    "vivace_reader_close": (c_void_p,),
    "vivace_reader_reschedule": (c_void_p, c_int64, c_int64),
    "vivace_reader_wait": (c_void_p, c_int64, POINTER(CEnded)),
    "vivace_reader_counts": (c_void_p, c_void_p),
    "vivace_page_sums": (c_void_p, c_int64, c_void_p, c_int64),
}


@cache
def open_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Load the compiled library and declare the types of its functions.

    Raises:
        DependencyError: the library is not built, was built from other sources, or cannot be loaded; the message has
            the command that builds it.
    """
    remedy = "install a C++ compiler and run: python -m vivace.kernels.build"
    if not path.is_file():
        raise DependencyError(f"the native kernels are not built; {remedy}")
    try:
        library = ctypes.CDLL(str(path))
        library.vivace_sources.restype = ctypes.c_char_p
        built_from = library.vivace_sources().decode()
    except (OSError, AttributeError) as error:
        raise DependencyError(f"{path.name} cannot be loaded ({error}); {remedy}") from error
    if built_from != fingerprint():
        raise DependencyError(f"{path.name} was built from other sources ({built_from}, not {fingerprint()}); {remedy}")
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.vivace_chain.argtypes = (c_int64, c_int64, POINTER(CPlan), c_void_p)
    library.vivace_speculate.argtypes = (c_int64, c_int64, POINTER(CPlan), POINTER(CPlan), c_void_p, c_void_p)
    returning = (library.vivace_features, library.vivace_span_bytes, library.vivace_chain, library.vivace_speculate)
    for counting in (*returning, library.vivace_draw):
        counting.restype = c_int64
    library.vivace_span_bytes.argtypes = (c_int64, POINTER(CPlan), POINTER(CCall))
    library.vivace_reader_open.argtypes = (c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64)
    library.vivace_reader_open.restype = c_void_p
    library.vivace_reader_submit.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64)
    library.vivace_reader_submit.restype = c_int64
    library.vivace_reader_completed.argtypes = (c_void_p, POINTER(CEnded), c_int64, c_int64)
    library.vivace_reader_completed.restype = c_int64
    library.vivace_damaged.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_int64)
    library.vivace_damaged.restype = c_int64
    return library


@cache
def found_library() -> ctypes.CDLL | None:
    """Return the compiled library, or None where it cannot be loaded."""
    try:
        return open_library()
    except DependencyError:
        return None


def runnable(library: ctypes.CDLL) -> frozenset[str]:
    """Return the names of the kernels that this processor and its operating system can run."""
    bits = library.vivace_features()
    return frozenset(name for name, bit in FEATURES.items() if bits & bit)


def body_of(library: ctypes.CDLL) -> int:
    """Return the index of the kernels that this processor runs for what AMX has no part in."""
    return BODIES["avx512" if "avx512" in runnable(library) else "avx2"]
