"""Structs of ``native/abi.h`` for drafting and verification in one native call, as ctypes describes them."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p

from vivace.kernels.library import CDelta, CDrawing, CGain, CMatrix, CPlaces, CPlan

Numbers = POINTER(c_int64)


class CDeepRead(Structure):
    """Mirrors ``DeepRead``: a draft row's attention to the entries of a deep layer."""

    _fields_ = [("layer", c_int64), ("gain", c_void_p), ("query", CMatrix), ("output", CMatrix)]


class CChain(Structure):
    """Mirrors ``Chain``: chains of draft tokens, one below the last token of each sequence."""

    _fields_ = [
        ("head", CMatrix),
        ("rows", CMatrix),
        *((name, c_void_p) for name in ("embedding", "positions")),
        ("final_norm", CGain),
        *((name, c_void_p) for name in ("scale", "offsets")),
        *((name, POINTER(c_void_p)) for name in ("keys", "values", "cosines", "sines")),
        ("places", POINTER(CPlaces)),
        ("deltas", POINTER(CDelta)),
        ("worn", POINTER(CDelta)),
        ("reads", POINTER(CDeepRead)),
        *((name, Numbers) for name in ("slot", "length", "root", "limit", "ends")),
        *((name, c_void_p) for name in ("ids", "tokens", "slots", "nodes", "parents", "hidden")),
        ("drawings", POINTER(CDrawing)),
        *((name, c_int64) for name in ("exit_layer", "sequences", "is_fed", "num_deltas", "num_worn", "num_ropes")),
        *((name, c_int64) for name in ("num_offsets", "num_reads", "num_ends")),
        *((name, c_float) for name in ("embedding_scale", "min_confidence", "softcap", "certain")),
    ]


class CStreams(Structure):
    """Mirrors ``Streams``: draft rows that follow the last kept row through the upper layers."""

    _fields_ = [
        ("plan", POINTER(CPlan)),
        *((name, c_void_p) for name in ("embeddings", "ones")),
        ("feedback", CMatrix),
        ("head", CMatrix),
        ("ids", c_void_p),
        ("deltas", POINTER(CDelta)),
        *((name, c_void_p) for name in ("final", "entering", "left")),
        *((name, CMatrix) for name in ("pruner_down", "pruner_up", "exit_head")),
        *((name, c_int64) for name in ("num_deltas", "insertion_layer", "count", "has_feedback")),
        *((name, c_int64) for name in ("rides", "runs_behind")),
        ("embedding_eps", c_float),
    ]


class CHeads(Structure):
    """Mirrors ``Heads``: heads on the last kept row, each of which guesses a later token."""

    _fields_ = [
        ("mix", CMatrix),
        ("heads", POINTER(CMatrix)),
        *((name, c_void_p) for name in ("ids", "kept")),
        ("count", c_int64),
    ]


class CSpeculation(Structure):
    """Mirrors ``Speculation``: several steps of drafting and verification of one sequence."""

    _fields_ = [
        ("streams", POINTER(CStreams)),
        ("heads", POINTER(CHeads)),
        ("widths", Numbers),
        ("head", CMatrix),
        ("feedback", CMatrix),
        *((name, c_int64) for name in ("has_feedback", "steps", "room")),
        *((name, c_void_p) for name in ("tokens", "hidden")),
        *((name, Numbers) for name in ("kept", "guessed", "depths")),
        *((name, c_int64) for name in ("most", "draft_ns")),
    ]
