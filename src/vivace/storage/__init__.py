"""Models whose weights are larger than memory.

``store.py`` describes the file, ``convert.py`` writes it, ``budget.py`` decides what stays in memory, and
``loading.py`` builds a decoder over it. ``io/`` reads the file. Whatever does not stay in memory is brought by one of
three: ``streaming.py`` reads matrices ahead of their layer, ``neurons/`` reads only the neurons that are active, and
``experts/`` reads the experts that routers choose or are predicted to choose.
"""
