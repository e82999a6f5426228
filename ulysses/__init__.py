"""Sequence-parallel attention for PyTorch: two all-to-alls around an ordinary attention kernel.

Letters in shapes, here and in every name's suffix (`q_blhd` is what this rank holds):

    b  batch                h  query heads           p  ranks
    s  whole sequence       k  key/value heads       d  head dim
    l  local sequence       g  local query heads

Tensors are laid out as `[batch, seq, heads, dim]` everywhere.
"""
