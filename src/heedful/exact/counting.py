"""Counting: how many numbers multi-head attention learns (source 000, remarks 1.2.1 and 1.2.2)."""

from __future__ import annotations


def attention_parameters(embedding: int, key: int, value: int, heads: int = 1, bias: bool = False) -> int:
    """The size of W_Q, W_K (embedding x key / heads each), W_V (embedding x value / heads) of all heads, and of W_O (value x embedding).

    It is the same for any number of heads (remark 1.2.1):

    >>> [attention_parameters(512, 64, 128, heads) for heads in (1, 2, 8)]
    [196608, 196608, 196608]

    Biases are one more row of each matrix, X' = [X | 1] and H' = [H | 1] (remark 1.2.2), and change nothing of that:

    >>> [attention_parameters(512, 64, 128, heads, bias=True) for heads in (1, 2, 8)]
    [197376, 197376, 197376]

    One more key dim of every head costs two columns of each head, one more value dim a column and a row:

    >>> attention_parameters(512, 72, 128, 8) - attention_parameters(512, 64, 128, 8)
    8192
    """
    for name, size in (("key", key), ("value", value)):
        if size % heads:
            raise ValueError(f"{heads} heads cannot share {size} {name} dims evenly; use a multiple of {heads}.")
    rows = embedding + bias
    per_head = 2 * rows * (key // heads) + rows * (value // heads)
    return per_head * heads + (value + bias) * embedding
