"""The derivative of one attention call by its queries, keys and values, as a linear map that goes over tiles, never L x L."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Capture
from ..ops.sweep import BLOCK, Seen, Sweep, Tile

if TYPE_CHECKING:
    from jaxtyping import Float

KEPT = 2**24  # probabilities that are kept between products; a longer call computes them each time


@dataclass(frozen=True)
class Piece:
    """The probabilities P of one tile; a group is a key head of a text, with the query heads that share it as more rows."""

    groups: slice
    spots: slice  # its queries
    keys: slice
    mass: Tensor  # (groups, rows, keys)
    steep: Tensor  # P times the derivative of the soft cap
    out: Tensor  # (groups, rows, width)


class CallDerivative:
    """dO as a linear map of (dq, dk, dv), and its transpose; what is left out of (dq, dk, dv) does not move.

    With T = P * s (dq k^T + q dk^T): dO = P dv + T v - rowsum(T) O, and transposed T = s P * (G v^T - rowsum(G * O)): dq = T k,
    dk = T^T q, dv = P^T G. O(tokens) memory: probabilities are computed tile by tile, and kept only where they are few.

    >>> q, k, v, dq = torch.randn(4, 1, 2, 5, 8, dtype=torch.float64)
    >>> found = CallDerivative(Capture("layer", q, k, v)).push(dq)
    >>> attend = lambda q: (q @ k.mT).softmax(-1) @ v
    >>> torch.allclose(found, torch.func.jvp(attend, (q,), (dq,))[1])
    True
    """

    def __init__(self, call: Capture):
        self.call = call
        self.kept: list[Piece] | None = None  # where probabilities are few
        self.seen: list[tuple[Seen, Piece]] | None = None  # where they are many: their lse, and pieces without P
        self.sweep = Sweep(call.q, call.logits)
        self.shared = self.sweep.shared
        self.q, self.k, self.v = self._rows(call.q * call.scale), self._keys(call.k), self._keys(call.v)

    @torch.no_grad()
    def push(self, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None) -> Tensor:
        """How O moves when q, k and v do (a JVP): (batch, heads, queries, width)."""
        out = self.v.new_zeros(*self.q.shape[:3], self.v.shape[-1])
        dq, dk, dv = (
            None if dq is None else self._rows(dq * self.call.scale),
            *(None if t is None else self._keys(t) for t in (dk, dv)),
        )
        for piece in self._pieces():
            found = None if dv is None else torch.bmm(piece.mass, dv[piece.groups, piece.keys])
            moved = self._moved(piece, dq, dk)
            if moved is not None:
                part = torch.bmm(moved.mul_(piece.steep), self.v[piece.groups, piece.keys])
                part.addcmul_(moved.sum(-1, keepdim=True), piece.out, value=-1)
                found = part if found is None else found.add_(part)
            if found is not None:
                self._put(out, piece, found)
        return out.view(*self.call.q.shape[:3], -1).to(self.call.v.dtype)

    @torch.no_grad()
    def pull(self, grad: Float[Tensor, "batch heads queries width"]) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v for the gradient of O (a VJP)."""
        grad, dq = self._rows(grad), torch.zeros_like(self.q)
        dk, dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        for piece in self._pieces():
            here, k, v = self._take(grad, piece), self.k[piece.groups, piece.keys], self.v[piece.groups, piece.keys]
            pulled = torch.bmm(here, v.mT, out=self.sweep.buffer("scratch", piece.mass.shape))
            pulled.sub_((here * piece.out).sum(-1, keepdim=True)).mul_(piece.steep)
            dv[piece.groups, piece.keys].baddbmm_(piece.mass.mT, here)
            dk[piece.groups, piece.keys].baddbmm_(pulled.mT, self._take(self.q, piece))
            self._put(dq, piece, torch.bmm(pulled, k))
        keys, call = self.sweep.count, self.call
        dq = (dq * call.scale).view(call.q.shape).to(call.q.dtype)
        return dq, dk[:, :keys].view(call.k.shape).to(call.k.dtype), dv[:, :keys].view(call.v.shape).to(call.v.dtype)

    def _moved(self, piece: Piece, dq: Tensor | None, dk: Tensor | None) -> Tensor | None:
        """How the logits move: s (dq k^T + q dk^T)."""
        moved = self.sweep.buffer("scratch", piece.mass.shape)
        if dq is not None:
            torch.bmm(self._take(dq, piece), self.k[piece.groups, piece.keys].mT, out=moved)
        if dk is not None:
            beta = 0 if dq is None else 1
            torch.baddbmm(moved, self._take(self.q, piece), dk[piece.groups, piece.keys].mT, beta=beta, out=moved)
        return None if dq is None and dk is None else moved

    def _pieces(self) -> Iterator[Piece]:
        if self.kept is not None:
            yield from self.kept
            return
        if self.seen is not None:
            yield from (self._again(*seen) for seen in self.seen)
            return
        few = self.q.shape[:3].numel() * self.sweep.count <= KEPT
        kept, seen = [], []
        for tile in self.sweep:
            piece = self._piece(tile, tile.mass.clone() if few else tile.mass)
            kept += [piece] if few else []
            seen += [] if few else [(Seen.of(tile), replace(piece, mass=piece.out, steep=piece.out))]
            yield piece
        self.kept = kept if few else None
        self.seen = None if few or self.call.cap is not None else seen

    def _piece(self, tile: Tile, mass: Tensor) -> Piece:
        heads = self.q.shape[0] // max(1, len(self.call.q))  # key heads
        first = tile.entries.start * heads + tile.heads.start // self.shared
        groups = slice(first, first + mass.shape[:2].numel() // self.shared)
        mass = mass.view(groups.stop - first, -1, mass.shape[-1])
        steep = mass if tile.slope is None else mass * tile.slope.view(mass.shape)
        keys = slice(tile.low, tile.low + mass.shape[-1])
        return Piece(groups, tile.spots, keys, mass, steep, torch.bmm(mass, self.v[groups, keys]))

    def _again(self, seen: Seen, piece: Piece) -> Piece:
        """A piece of which all but P was kept."""
        mass = self.sweep.again(seen).view(*piece.out.shape[:2], -1)
        return replace(piece, mass=mass, steep=mass)

    def _take(self, x: Tensor, piece: Piece) -> Tensor:
        """The rows of a piece, (groups, shared * queries, dim)."""
        return x[piece.groups, :, piece.spots].flatten(1, 2)

    def _put(self, x: Tensor, piece: Piece, rows: Tensor) -> None:
        x[piece.groups, :, piece.spots] = rows.view(rows.shape[0], self.shared, -1, rows.shape[-1])

    def _rows(self, x: Tensor) -> Tensor:
        """Of queries: (groups, shared, queries, dim)."""
        return x.to(self.sweep.k.dtype).reshape(-1, self.shared, *x.shape[-2:])

    def _keys(self, x: Tensor) -> Tensor:
        """Of keys: (groups, keys, dim), to whole blocks."""
        return F.pad(x.to(self.sweep.k.dtype).reshape(-1, *x.shape[-2:]), (0, 0, 0, -x.shape[-2] % BLOCK))
