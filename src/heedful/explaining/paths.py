"""Paths of a real model: what it makes of a text as a sum over all ways through its heads, by length and by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import exact
from ..checkpoint import Checkpoint, load
from ..exact.frozen import Scaling
from ..exact.paths import Through, check_through
from ..huggingface.apart import Apart, take_apart
from ..inputs import collate, read
from ..scan import evaluating, prepare, run
from ..texts import items

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True, eq=False)
class Paths:
    """What paths of each length, and through each head, make of texts; a row is one text.

    `names` says what the columns of `norms` and `shares` are: path lengths, then the paths that begin at an MLP and at a bias.
    A norm is the Frobenius norm of that part of the output over the text's tokens; a share is its part of <output, output>, so that
    shares add up to 1. `heads` (layers, heads) is the share of all paths through a head (that pass MLPs by their gates), a mean over
    texts. `error` is the largest |sum of paths - output| / |output| of a batch.
    """

    model: str
    mlp: str
    max_length: int | None
    names: tuple[str, ...]
    layers: tuple[str, ...]
    norms: Float[Tensor, "texts parts"]
    shares: Float[Tensor, "texts parts"]
    heads: Float[Tensor, "layers heads"]
    passes: int  # streams sent through an attention layer, for one batch
    error: float

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        tensors = {name: getattr(self, name).tolist() for name in ("norms", "shares", "heads")}
        plain = {name: getattr(self, name) for name in ("model", "mlp", "max_length", "passes", "error")}
        return {**plain, "names": list(self.names), "layers": list(self.layers), **tensors}


def path_streams(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any,
    mlp: Through = "gate",
    max_length: int | None = None,
    limit: int | None = None,
    batch: int = 1,
    length: int | None = None,
) -> Paths:
    """Every path of a model by its length and through each head, exactly, with attention weights, norms' scales and gates as they were.

    A model of L layers and H heads has (H + 1)^L paths. `max_length` keeps the longer ones in one part: see
    `heedful.exact.path_streams` for `mlp` and the cost. Known families: bert, gpt2, llama, vit and those built alike.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=3, vocab_size=9, n_positions=5, bos_token_id=0, eos_token_id=0))
    >>> found = path_streams(model, [{"input_ids": [1, 5, 4, 3]}], max_length=1)
    >>> found.names, found.heads.shape, found.error < 1e-5
    (('length 0', 'length 1', 'longer than 1', 'MLPs', 'biases'), torch.Size([3, 2]), True)
    """
    check_through(mlp, max_length)
    checkpoint = load(model)
    norms, shares, heads, error, passes = [], [], [], 0.0, 0
    apart = None
    for apart, network in networks(checkpoint, texts, limit, batch, length):
        streams = exact.path_streams(network, mlp, max_length)
        error = max(error, float((streams.total - network.output).norm() / network.output.norm()))
        norms.append(torch.cat([streams.norms(apart.real), _norms(streams.made, streams.bias, apart.real)], -1))
        shares.append(streams.shares(apart.real))
        heads.append(exact.attribute(network, _direction(network.output, apart.real)).heads.movedim(1, 0))
        passes = max(passes, streams.passes)
    assert apart is not None
    layers = tuple(block.attention for block in apart.blocks)
    names = _names(norms[0].shape[-1] - 2, max_length)
    rows = torch.cat(norms), torch.cat(shares), torch.cat(heads).mean(0)
    return Paths(checkpoint.name, mlp, max_length, names, layers, *rows, passes, error)


def networks(
    model: str | Path | nn.Module | Checkpoint, texts: Any, limit: int | None = None, batch: int = 1, length: int | None = None
) -> Iterator[tuple[Apart, exact.Network]]:
    """A model taken apart and frozen as it reads each batch of texts."""
    checkpoint = load(model)
    reading = read(checkpoint, items(texts, limit), batch, length, limit)
    with evaluating(checkpoint.model):
        for group in reading.batches:
            inputs = prepare(checkpoint.model, collate(checkpoint, group))
            apart = take_apart(checkpoint.model, lambda inputs=inputs: run(checkpoint.model, inputs))
            yield apart, frozen(apart)


@torch.no_grad()
def frozen(apart: Apart) -> exact.Network:
    """The network of a model taken apart, as it was in its run."""
    layers = tuple(exact.freeze(*pieces) for pieces in zip(apart.blocks, apart.calls, apart.states, strict=False))
    final = None if apart.final is None else Scaling(apart.final, apart.final.inverse(apart.states[-1]))
    return exact.Network(apart.states[0], layers, apart.output, final)


def _names(lengths: int, max_length: int | None) -> tuple[str, ...]:
    whole = max_length is None or lengths <= max_length + 1
    plain = [f"length {k}" for k in range(lengths if whole else lengths - 1)]
    return (*plain, *([] if whole else [f"longer than {max_length}"]), "MLPs", "biases")


def _norms(made: Tensor, bias: Tensor, real: Bool[Tensor, "batch tokens"] | None) -> Float[Tensor, "batch 2"]:
    rows = torch.stack([made, bias]).norm(dim=-1)
    return (rows if real is None else rows * real).norm(dim=-1).mT


def _direction(output: Tensor, real: Tensor | None) -> Tensor:
    """Output / |output|^2 over the tokens that are real."""
    kept = output if real is None else output * real[..., None]
    return kept / kept.square().sum((-2, -1), keepdim=True)
