"""Paths: what a transformer computes as a sum over all ways through its heads, by how many heads they pass, and by each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .frozen import FrozenLayer, Network

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Through = Literal["gate", "source"]


@dataclass(frozen=True, eq=False)
class PathStreams:
    """A network's output as a sum: `tokens[k]` of all paths from its input through k heads, `made` of those that begin at what an MLP
    makes (none with "gate"), `bias` of those that begin at a bias.

    With `max_length` m the last of `tokens`, number m + 1, holds all paths longer than m. `passes` is how many streams were sent
    through an attention layer.
    """

    tokens: Float[Tensor, "lengths batch tokens dim"]
    made: Float[Tensor, "batch tokens dim"]
    bias: Float[Tensor, "batch tokens dim"]
    passes: int
    max_length: int | None = None

    @property
    def total(self) -> Float[Tensor, "batch tokens dim"]:
        """The network's output."""
        return self.tokens.sum(0) + self.made + self.bias

    def norms(self, real: Bool[Tensor, "batch tokens"] | None = None) -> Float[Tensor, "batch lengths"]:
        """The Frobenius norm of each length's stream over the tokens that are real, in each text."""
        rows = self.tokens.norm(dim=-1)
        return (rows if real is None else rows * real).norm(dim=-1).mT

    def shares(self, real: Bool[Tensor, "batch tokens"] | None = None) -> Float[Tensor, "batch parts"]:
        """<stream, output> / <output, output> of each length and, last, of what MLPs made and of the biases: they add up to 1."""
        total = self.total if real is None else self.total * real[..., None]
        along = torch.stack([(s * total).sum((-2, -1)) for s in (*self.tokens, self.made, self.bias)], -1)
        return along / total.square().sum((-2, -1))[:, None]


@torch.no_grad()
def path_streams(network: Network, mlp: Through = "gate", max_length: int | None = None) -> PathStreams:
    """The output of a frozen network by the length of paths: of all (heads + 1)^layers of them, in layers^2 / 2 attention passes.

    Through one layer S_k becomes S_k + sum_h P_h S_(k-1) W_h (the first term by the skip), S_k being the paths through k heads so far.
    An MLP either lets paths through with the gate it had (`mlp="gate"`), or what it makes starts as a path of length 0
    (`mlp="source"`). P_path = P^L ... P^1, the last layer leftmost, and W_path = W^1 ... W^L.

    Cost: layer l sends min(l, max_length + 2) streams of paths and one of biases through its attention, and with "gate" one more
    through its MLP; with "source" only one stream in all passes the MLP, and one more the attention. Without `max_length` that is
    L(L+1)/2 streams of paths; q, k and P are worked out once a layer for all of them.

    >>> from heedful.exact.frozen import attention_network, random_heads
    >>> x = torch.randn(1, 5, 8, dtype=torch.float64)
    >>> heads = [random_heads(2, 8, seed) for seed in range(3)]
    >>> streams = path_streams(attention_network(x, heads, skip=True))
    >>> len(streams.tokens), streams.passes  # 27 paths of lengths 0 to 3; 3 + 2 + 1 and the biases' 3
    (4, 9)
    >>> state = x
    >>> for one in heads:
    ...     q, k, v = one.project(state)
    ...     state = state + one.join((q @ k.mT / 2).softmax(-1) @ v)
    >>> torch.allclose(streams.total, state, rtol=1e-12)
    True

    Dong et al. 2021, Attention is not all you need (theorem 2.1, in the right order and with its biases).
    """
    check_through(mlp, max_length)
    last = len(network.layers) if max_length is None else max_length + 1
    nothing, passes = torch.zeros_like(network.x), 0
    tail = [nothing] * (2 if mlp == "source" and any(layer.mlp is not None for layer in network.layers) else 1)
    streams = torch.stack([network.x, *tail])  # tokens by length, then what MLPs made, then the biases
    for layer in network.layers:
        passes += len(streams)
        streams = through(layer, streams, last, len(tail))
    if network.final is not None:
        streams = network.final(streams)
        streams[-1] += network.final.norm.bias
    made = nothing if len(tail) == 1 else streams[-2]
    return PathStreams(streams[: -len(tail)], made, streams[-1], passes, max_length)


def check_through(mlp: str, max_length: int | None) -> None:
    """Refuse settings of `path_streams` that mean nothing."""
    if mlp not in ("gate", "source"):
        raise ValueError(f"mlp is {mlp!r}; give 'gate' (paths go through MLPs) or 'source' (what an MLP makes starts new paths).")
    if max_length is not None and max_length < 0:
        raise ValueError(f"max_length is {max_length}; give 0 or more, or None for every length.")


def through(layer: FrozenLayer, streams: Tensor, last: int, tail: int = 1) -> Tensor:
    """The streams after a layer: lengths up to `last`, then `tail` more: the biases, and before them with 2 what MLPs made.

    Biases are added to the last stream: without a tail give a layer that is `unbiased`.
    """
    read = _normed(layer, 0, streams) if layer.pre else streams
    mixed = layer.attend(read)
    mixed[-1] += layer.heads.b_o
    streams = _longer(streams if layer.skip else torch.zeros_like(streams), mixed, last, tail)
    streams = streams if layer.pre else _normed(layer, 0, streams)
    if layer.mlp is None:
        return streams
    read = _normed(layer, 1, streams) if layer.pre else streams
    if tail < 2:
        streams = streams + _gated(layer, read)
    else:
        streams[-2] += _gated(layer, read.sum(0, keepdim=True))[0]
    return streams if layer.pre else _normed(layer, 1, streams)


def _longer(kept: Tensor, mixed: Tensor, last: int, tail: int) -> Tensor:
    """What skipped the layer, and what passed a head one length further; the longest stay together."""
    before = len(kept) - tail
    after = min(before, last) + 1
    grown = kept.new_zeros(after + tail, *kept.shape[1:])
    grown[:before], grown[after:] = kept[:before], kept[before:] + mixed[before:]
    grown[1:after] += mixed[: after - 1]
    if before == after:
        grown[after - 1] += mixed[before - 1]
    return grown


def _normed(layer: FrozenLayer, which: int, streams: Tensor) -> Tensor:
    """Through a norm as it was: its bias joins the biases."""
    if layer.norms is None:
        return streams
    scaling = layer.norms[which]
    out = scaling(streams)
    out[-1] += scaling.norm.bias
    return out


def _gated(layer: FrozenLayer, read: Tensor) -> Tensor:
    """Through the MLP with the gate it had; the biases go with the last stream."""
    assert layer.mlp is not None
    assert layer.slope is not None
    raised = read @ layer.mlp.up
    raised[-1] += layer.mlp.b_up
    out = raised.mul_(layer.slope) @ layer.mlp.down
    out[-1] += layer.mlp.b_down
    return out
