"""Preserving: layers get more dims without data, and the model computes what it did, bit by bit; the new dims can learn at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .huggingface.adopt import Matrices, adopt, matrices, reshape
from .huggingface.layer import Sizes
from .huggingface.optimizers import Carrier
from .plan import each
from .widening import New, widen_heads, widen_qk, widen_v

WIDEN = {"qk": widen_qk, "v": widen_v}
Wanted = Mapping[str, Any]  # by layer, new dims of every head, or of each key head


def preserve(model: nn.Module, wanted: Mapping[str, Wanted], optimizer: Optimizer | None = None) -> None:
    """Grow layers in place: `wanted` says by how much, of `qk` and of `v`. An optimiser takes over the new parameters.

    New dims of q are random, of the size that its rows have, and their keys are zero; those of v are random, and W_O does not read them.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9, n_positions=5)).eval()
    >>> before = model(torch.arange(5)[None]).last_hidden_state
    >>> preserve(model, {"qk": {"h.0.attn": (3, 1)}, "v": {"h.0.attn": 2}})
    >>> model.h[0].attn.sizes.qk, torch.allclose(model(torch.arange(5)[None]).last_hidden_state, before, atol=1e-6)
    ((7, 5), True)
    """
    names = list(dict.fromkeys(name for some in wanted.values() for name in some))
    carrier = None if optimizer is None else Carrier(model, optimizer, names)
    adopted = adopt(model, names)
    before = {name: module.sizes for name, module in adopted.items()}
    for what, some in wanted.items():
        for seed, (name, count) in enumerate(some.items()):
            found = matrices(model, name)
            reshape(model, name, *WIDEN[what](found, adopted[name].sizes, _made(found, adopted[name].sizes, what, count, seed)))
    if carrier is not None:
        carrier.settle(partial(zeros_behind, wanted, before))


def zeros_behind(wanted: Mapping[str, Wanted], before: Mapping[str, Sizes], name: str, found: Matrices) -> Matrices:
    """What is known about a layer's parameters, with zeros for their new entries."""
    sizes = before[name]
    for what, some in wanted.items():
        if name in some and what == "heads":
            found, sizes = _head_of_zeros(found, sizes)
        elif name in some:
            new = _made(found, sizes, what, some[name], 0)
            zeros = replace(new, left=torch.zeros_like(new.left), right=torch.zeros_like(new.right))
            found, sizes = WIDEN[what](found, sizes, zeros)
    return found


def _head_of_zeros(found: Matrices, sizes: Sizes) -> tuple[Matrices, Sizes]:
    width = sizes.v[-1]
    zeros = New(torch.zeros(1, found.v.shape[1] + 1, width), torch.zeros(1, found.o.shape[0], width))
    larger, after = widen_heads(found, sizes, zeros)
    k, b_k, dims = larger.k.clone(), None if larger.b_k is None else larger.b_k.clone(), after.qk[-1]
    for one in (k, b_k):
        if one is not None:
            one[-dims:] = 0
    return replace(larger, k=k, b_k=b_k), after


def _made(found: Matrices, sizes: Sizes, what: str, count: int | tuple[int, ...], seed: int) -> New:
    weight, right = (found.q, found.k.shape[1]) if what == "qk" else (found.v, found.o.shape[0])
    norm, counts = float(weight.double().norm(dim=1).mean()) or 1.0, each(count, len(sizes.qk))
    new = New.random(sizes.heads, weight.shape[1], right, max(counts), norm, seed)
    group = 1 if what == "qk" else sizes.heads // len(sizes.v)  # heads that share their values share the columns
    return replace(new, left=new.left[::group].repeat_interleave(group, 0), counts=counts)
