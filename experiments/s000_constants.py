"""Every entry of dS counts alike in the regression, and every bias of the augmented matrices is a parameter.

Source 000, section 2: the Frobenius norm of dS over all pairs; remark 1.2.2: biases are one more row of W_Q, W_K, W_V and W_O. Expected:
softmax ignores a constant for a row, so dL/dS has rows that sum to zero, the key bias changes nothing and needs no place, and only the
query side is augmented; masked pairs have no gradient at all, so norms run over visible pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact.operators import Fisher, Frobenius
from heedful.lesson import Lesson
from heedful.mask import Mask

from .drawing import COLOURS, figure

VERDICT = (
    "holds if constants of a row are left out: they change no probability, so b_K is a null parameter and X is augmented on the query side "
    "alone; masked pairs are no entries"
)
ERRATA = ("000.5", "000.6")
SIZES = {"tiny": {"draws": 5, "tokens": 12}, "small": {"draws": 50, "tokens": 32}, "full": {"draws": 200, "tokens": 64}}
DIM, KEY = 8, 4


def measure(size: str) -> dict[str, Any]:
    """The largest row sum of dL/dS, gradients of b_Q and b_K, what a constant weighs in both metrics, gradients at masked pairs."""
    setting: Any = SIZES[size]
    found = [once(seed, setting["tokens"]) for seed in range(setting["draws"])]
    return {**setting, **{name: max(f[name] for f in found) for name in found[0]}}


def once(seed: int, tokens: int) -> dict[str, float]:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, back = random(1, tokens, DIM), random(1, 1, tokens, KEY)
    w_q, w_k, w_v = (random(DIM, KEY) / DIM**0.5 for _ in range(3))
    b_q, b_k = random(KEY).requires_grad_(), random(KEY).requires_grad_()
    q, k, v = (x @ w_q + b_q)[:, None], (x @ w_k + b_k)[:, None], (x @ w_v)[:, None]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    logits = q @ k.mT / KEY**0.5
    logits.retain_grad()
    (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v * back).sum().backward()
    assert logits.grad is not None
    assert b_q.grad is not None
    assert b_k.grad is not None
    lesson = Lesson("one", q.detach(), k.detach(), v, Mask(causal=True), KEY**-0.5, states=x)
    shift = torch.linalg.pinv(x[0]) @ torch.ones(tokens, 1, dtype=torch.float64)  # x shift is as constant as x allows
    row = random(DIM + 1, 1) @ shift.mT
    plain = random(DIM + 1, DIM)
    weigh = {
        name: weight(metric([lesson]), row) / weight(metric([lesson]), plain)
        for name, metric in (("KL", Fisher), ("Frobenius", Frobenius))
    }
    scale = float(logits.grad.abs().max())
    return {
        "row_sums": float(logits.grad.sum(-1).abs().max()) / scale,
        "masked": float(logits.grad[..., hidden].abs().max()),
        "b_q": float(b_q.grad.norm()),
        "b_k": float(b_k.grad.norm()) / float(b_q.grad.norm()),
        **weigh,
    }


def weight(metric: Any, z: Tensor) -> float:
    """<Z, A(Z)> a unit of Z."""
    z = (z / z.norm())[None]
    return float((z * metric(z)).sum())


def holds(numbers: dict[str, Any]) -> bool:
    null = max(numbers["row_sums"], numbers["b_k"]) < 1e-12 and numbers["masked"] == 0
    return null and numbers["b_q"] > 0.01 and numbers["KL"] < numbers["Frobenius"]


def figure_of(numbers: dict[str, Any]) -> str:
    return (
        f"rows of dL/dS sum to {numbers['row_sums']:.0e} of its entries, |dL/db_K| is {numbers['b_k']:.0e} of |dL/db_Q|, masked entries get "
        f"{numbers['masked']:.0f}; a near-constant of a row weighs {numbers['KL']:.2f} in KL and {numbers['Frobenius']:.2f} in Frobenius, at most"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    bars = {"row sums of dL/dS": numbers["row_sums"], "dL/db_K against dL/db_Q": numbers["b_k"]}
    bars |= {"a row's constant, KL": numbers["KL"], "a row's constant, Frobenius": numbers["Frobenius"]}
    with figure(path) as (axes,):
        axes.barh(list(bars)[::-1], list(bars.values())[::-1], color=COLOURS[0])
        axes.set(xscale="log", xlim=(1e-18, 10), xlabel="relative size")
