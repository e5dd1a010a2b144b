"""The operations that decoding spends its time in, on raw tensors: in PyTorch and as compiled C++.

``reference`` is plain PyTorch, runs everywhere and is what every other implementation is tested against. ``native``
calls the library that ``build`` compiles from ``native/`` for AVX2, AVX-512 and AMX. ``choice`` chooses the
implementation once for an engine and gives the reason; it never changes afterwards.
"""
