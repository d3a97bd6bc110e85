"""Notation: errata that are slips of the pen, shown by shapes rather than measured; they have rows in the ledger too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slip:
    """One slip: the item of the errata, what is written, what it must be, and what shows it."""

    item: str
    claim: str
    verdict: str
    figure: str
    shown: Callable[[], bool]


def projections() -> bool:
    """With rows for tokens, only X W_Q has a shape; E needs W_Q W_K^T; and an output bias moves every token alike."""
    x, w_q, w_k, w_v, w_o = (torch.randn(*s, dtype=torch.float64) for s in ((5, 8), (8, 3), (8, 3), (8, 4), (4, 8)))
    try:
        _ = w_q @ x
    except RuntimeError:
        fits = False
    else:
        fits = True
    p = ((x @ w_q) @ (x @ w_k).mT / 3**0.5).softmax(-1)
    same = torch.allclose(p, (x @ (w_q @ w_k.mT) @ x.mT / 3**0.5).softmax(-1))
    b_v, b_o = torch.randn(4, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    layer = p @ (x @ w_v + b_v) @ w_o + b_o
    return not fits and same and torch.allclose(layer - p @ x @ w_v @ w_o, (b_v @ w_o + b_o).expand(5, 8))


def keys_from_values() -> bool:
    """With K^(i) = V W_v no key reaches the logits: other keys change nothing; and one source may have two widths."""
    q, k, v, w = (torch.randn(4, 6, dtype=torch.float64) for _ in range(4))
    w = torch.randn(6, 6, dtype=torch.float64)

    def logits(keys: torch.Tensor, written: bool) -> torch.Tensor:
        return q @ ((v if written else keys) @ w).mT

    blind = torch.equal(logits(k, True), logits(k + 1, True)) and not torch.equal(logits(k, False), logits(k + 1, False))
    one_source = (k @ torch.randn(6, 2, dtype=torch.float64)).shape[-1] != (k @ torch.randn(6, 5, dtype=torch.float64)).shape[-1]
    return blind and one_source


SLIPS = (
    Slip(
        "001.1",
        "Q = W^Q X, E uses W_QS, and b_O is the sum of the heads' biases.",
        "wrong: Q = X W_Q where rows are tokens, E uses W_QK = W_Q W_K^T, and b = sum_h W_O,h^T b_V,h + b_O has an output bias of its own",
        "5 x 8 tokens and an 8 x 3 W_Q: only X W_Q has a shape; softmax(X W_QK X^T / sqrt d) is the attention",
        projections,
    ),
    Slip(
        "002.18",
        "K^(i) = V W_v, and self-attention is attention whose output has the dimension of its input.",
        "wrong: K^(i) = K W_k; self-attention means one source X for queries, keys and values, of whatever dimensions",
        "written so, other keys leave every logit as it was; one X gives queries of 2 and values of 5 dims",
        keys_from_values,
    ),
)
