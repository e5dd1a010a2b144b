"""The transformer: one decoder whose layers are called one at a time, or as a span.

Shape letters, used without explanation everywhere else:

    B  batch (slots in a call)     T  rows (tokens) in this call     S  entries (tokens) in the cache
    L  layers                      H  query heads                    K  key/value heads
    D  head width                  E  model width                    F  feed-forward width
    V  vocabulary                  N  draft tokens                   C  codebook entries
    R  ranks                       X  experts                        A  longest path of a draft tree

Words: a *row* is a vector going up in this call, a *slot* a sequence's place in the cache, an *entry* a
stored position of a slot, a *node* a token of a draft. Rows of all slots are packed, ``(T, E)``.
"""
