"""Both gradients of f(x, y) = softmax(l x^T A^T B y) C x are right where x and y are two inputs; with y = x they add up.

Source 003, the answer's last two formulas, dP_im / dY_lk and dP_im / dX_lk. Expected: they equal autograd's to rounding (3e-15). What is
to be said beside: C is keys x n (the answer's m x m shapes need as many keys as queries), the softmax sums over the keys of y where the
question writes n, the answer's sum over j keeps j = i alone and its index m stands for two things; self-attention is y = x, where either
gradient alone misses much; and softmax(.) C x is no transformer's attention, whose Jacobian is `attention_jacobian` (4e-15).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact import ColumnAttention, Layer, attention_jacobian

from .drawing import COLOURS, figure

VERDICT = "holds if x and y are two inputs; with y = x both gradients add up, and f is not a transformer's attention"
ERRATA = ("003",)
SIZES = {
    "tiny": {"seeds": 2, "widths": (2, 4)},
    "small": {"seeds": 8, "widths": (2, 4, 8, 16)},
    "full": {"seeds": 32, "widths": (2, 4, 8, 16, 24)},
}
KINDS = ("by x", "by y", "y = x, both", "y = x, by x alone", "y = x, by y alone", "a transformer's layer")
EXACT = KINDS[:3] + KINDS[5:]


def measure(size: str) -> dict[str, Any]:
    """The largest relative error over seeds of each gradient against autograd, by width."""
    setting: Any = SIZES[size]
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for width in setting["widths"]:
        found = [once(seed, width) for seed in range(setting["seeds"])]
        for kind in KINDS:
            errors[kind].append(max(row[kind] for row in found))
    return {**setting, "errors": errors}


def once(seed: int, width: int) -> dict[str, float]:
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    n, k, m, keys = width, width + 1, width + 2, width + 3
    x, y, f = draw(n, m), draw(n, keys), ColumnAttention(draw(k, n), draw(k, n), draw(keys, n), 0.5)
    g = ColumnAttention(f.a, f.b, draw(m, n), f.scale)
    both = torch.func.jacrev(lambda x: g(x, x))(x)
    layer = Layer(*(draw(n, n) for _ in range(4)), heads=2)
    tokens = x.mT.contiguous()
    return {
        "by x": off(f.by_x(x, y), torch.func.jacrev(f, 0)(x, y)),
        "by y": off(f.by_y(x, y), torch.func.jacrev(f, 1)(x, y)),
        "y = x, both": off(g.by_x(x, x) + g.by_y(x, x), both),
        "y = x, by x alone": off(g.by_x(x, x), both),
        "y = x, by y alone": off(g.by_y(x, x), both),
        "a transformer's layer": off(attention_jacobian(tokens, layer), torch.func.jacrev(layer)(tokens)),
    }


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def holds(numbers: dict[str, Any]) -> bool:
    """Two inputs and both gradients: rounding. One gradient alone where y = x: far off."""
    errors = numbers["errors"]
    return all(max(errors[kind]) < 1e-12 for kind in EXACT) and all(max(errors[kind]) > 0.1 for kind in KINDS if kind not in EXACT)


def figure_of(numbers: dict[str, Any]) -> str:
    worst = {kind: max(errors) for kind, errors in numbers["errors"].items()}
    return (
        f"by x {worst['by x']:.0e}, by y {worst['by y']:.0e}; y = x: both {worst['y = x, both']:.0e}, by x alone "
        f"{worst['y = x, by x alone']:.2f}, by y alone {worst['y = x, by y alone']:.2f}; a layer's Jacobian {worst[KINDS[-1]]:.0e}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for kind, colour in zip(KINDS, COLOURS, strict=True):
            axes.semilogy(numbers["widths"], numbers["errors"][kind], "-o", color=colour, label=kind, markersize=4)
        axes.set_xlabel("n, dims of x and y")
        axes.set_ylabel("largest relative error against autograd")
        axes.legend(fontsize=8)
