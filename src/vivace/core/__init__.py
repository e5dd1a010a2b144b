"""The transformer: one decoder whose layers are run one at a time or several in one call (a span).

Shape letters that are used without explanation everywhere else:

    B  batch (slots in a call)     T  rows (tokens) in this call     S  entries (tokens) in the cache
    L  layers                      H  query heads                    K  key/value heads
    D  head width                  E  model width                    F  feed-forward width
    V  vocabulary                  N  draft tokens                   C  codebook entries
    R  ranks                       X  experts                        A  longest path of a draft tree

Terms: a *row* is the residual of one token in this call; a *slot* is the place of one sequence in the cache; an *entry*
is a stored position of a slot, with its keys and values in every layer; a *node* is a token of a draft. The rows of all
slots of a call are packed into one tensor, ``(T, E)``.
"""
