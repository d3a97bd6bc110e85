"""The residual of attention depends on the projections' biases, which the argument leaves out.

Source 001, section 2.4: "Setting E = R W_QS / sqrt(d_qk) R^T and A~ = 1 r^T", without biases. Expected: the key bias adds one constant
to every row of logits and so never matters; the query bias enters r alone. For any x, with R = X - 1 x^T,
P = softmax(1 r^T + E), r^T = (x^T W_Q + b_Q^T) W_K^T R^T / sqrt(d_k), E = R W_Q W_K^T R^T / sqrt(d_k), to 5e-16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import heedful as hd
from heedful.demo import model_folder, texts

from .drawing import COLOURS, figure

VERDICT = (
    "holds if r has the query bias: r^T = (x^T W_Q + b_Q^T) W_K^T R^T / sqrt(d_k) for any x; the key bias never matters, "
    "so it may be left out, and out of a model"
)
ERRATA = ("001.4",)

SIZES = {
    "tiny": {"tokens": 24, "draws": 20},
    "small": {"tokens": 128, "draws": 200},
    "full": {"tokens": 512, "draws": 1000},
}


def measure(size: str) -> dict[str, Any]:
    """The identity's largest error; what attention, and MiniLM, give without key biases and without query biases."""
    setting: Any = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    found = [once(generator) for _ in range(setting["draws"])]
    worst = {name: max(draw[name] for draw in found) for name in found[0]}
    return {**setting, **worst, "model": {name: without(name, setting["tokens"]) for name in ("key", "query")}}


def once(generator: torch.Generator, tokens: int = 12, dim: int = 16, key_dim: int = 8) -> dict[str, float]:
    """Errors of one draw: of the identity, of P without the key bias, of P without the query bias."""
    shapes = ((tokens, dim), (dim, key_dim), (dim, key_dim), (key_dim,), (key_dim,), (dim,))
    x, w_q, w_k, b_q, b_k, centre = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    w_q, w_k = w_q / dim**0.5, w_k / dim**0.5

    def attention(b_q: Tensor, b_k: Tensor) -> Tensor:
        return ((x @ w_q + b_q) @ (x @ w_k + b_k).mT / key_dim**0.5).softmax(-1)

    p, rest = attention(b_q, b_k), x - centre  # any centre will do
    e = rest @ w_q @ w_k.mT @ rest.mT / key_dim**0.5
    r = (centre @ w_q + b_q) @ w_k.mT @ rest.mT / key_dim**0.5
    others = {"identity": (r + e).softmax(-1), "key": attention(b_q, 0 * b_k), "query": attention(0 * b_q, b_k)}
    return {name: (other - p).abs().max().item() for name, other in others.items()}


@torch.no_grad()
def without(which: str, tokens: int) -> float:
    """How far MiniLM's output moves, relative, when those biases of all layers are zero."""
    loaded = hd.load(model_folder(), dtype=torch.float64)
    inputs = loaded.processor(texts()[-1], truncation=True, max_length=tokens, return_tensors="pt")
    before = loaded.model(**inputs).last_hidden_state
    for name, parameter in loaded.model.named_parameters():
        if name.endswith(f"attention.self.{which}.bias"):
            parameter.zero_()
    return ((loaded.model(**inputs).last_hidden_state - before).norm() / before.norm()).item()


def holds(numbers: dict[str, Any]) -> bool:
    exact = numbers["identity"] < 1e-14 and numbers["key"] < 1e-14 and numbers["model"]["key"] < 1e-11
    return exact and numbers["query"] > 0.01 and numbers["model"]["query"] > 0.01


def figure_of(numbers: dict[str, Any]) -> str:
    return (
        f"identity to {numbers['identity']:.0e}, P without b_K to {numbers['key']:.0e} ({numbers['draws']} draws); "
        f"MiniLM's output without its key biases moves by {numbers['model']['key']:.0e}, without its query biases by {numbers['model']['query']:.2f}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    bars = {
        "P = softmax(1 r^T + E)": numbers["identity"],
        "P, no key bias": numbers["key"],
        "P, no query bias": numbers["query"],
        "MiniLM, no key biases": numbers["model"]["key"],
        "MiniLM, no query biases": numbers["model"]["query"],
    }
    with figure(path) as (axes,):
        axes.barh(list(bars)[::-1], list(bars.values())[::-1], color=COLOURS[0])
        axes.set(xscale="log", xlim=(1e-17, 10), xlabel="largest difference (MiniLM: relative)")
