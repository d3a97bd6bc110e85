"""The l1-centre: the point whose largest l1 distance to some rows is smallest, by an interior-point method with a certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

STEPS = 100
GAP = 1e-10  # of the radius
SHORT = 0.9995  # of the way to the boundary


@dataclass(frozen=True, eq=False)
class Centre:
    """A point, its largest distance to the rows, and what no point's largest distance is below: radius - floor is its error at most."""

    point: Float[Tensor, "... dim"]
    radius: Float[Tensor, "*batch"]
    floor: Float[Tensor, "*batch"]


def l1_centre(x: Float[Tensor, "... tokens dim"]) -> Centre:
    """The point c with the smallest largest row sum of |X - 1 c^T|.

    >>> found = l1_centre(torch.tensor([[0.0, 0.0], [2.0, 2.0], [2.0, 0.0]]))
    >>> round(found.radius.item(), 6), round(found.floor.item(), 6)
    (2.0, 2.0)

    It is a linear program, min t with |x_ij - c_j| <= u_ij and sum_j u_ij <= t, solved by Mehrotra's predictor and corrector; all
    but c and t are eliminated by hand, so a step costs tokens x dim^2. Any y with zero column sums proves that no radius is below
    sum(y X) / sum_i max_j |y_ij|.
    """
    if x.ndim > 2:
        parts = [l1_centre(part) for part in x.flatten(0, -3)]
        point, radius, floor = (
            torch.stack([getattr(part, name) for part in parts]).unflatten(0, x.shape[:-2]) for name in ("point", "radius", "floor")
        )
        return Centre(point, radius, floor)
    shift = x.double().mean(-2)
    rest = x.double() - shift
    size = rest.abs().amax()
    if size == 0:
        return Centre(x[0], size.to(x.dtype), size.to(x.dtype))
    point, floor = _solved(rest / size)
    point = point * size + shift
    return Centre(point.to(x.dtype), _farthest(x.double(), point).to(x.dtype), (floor * size).to(x.dtype))


def _farthest(x: Tensor, point: Tensor) -> Tensor:
    return (x - point).abs().sum(-1).amax()


class _Place(NamedTuple):
    """An inner point: c, and slacks with their multipliers for c <= x + u, c >= x - u (both (tokens, dim)) and sum u <= t (tokens)."""

    point: Tensor
    slack: tuple[Tensor, Tensor, Tensor]
    price: tuple[Tensor, Tensor, Tensor]

    @property
    def gap(self) -> float:
        return sum(float((s * p).sum()) for s, p in zip(self.slack, self.price, strict=True))

    @property
    def count(self) -> int:
        return sum(s.numel() for s in self.slack)


def _solved(x: Tensor) -> tuple[Tensor, Tensor]:
    """The best point found and the highest floor proved."""
    place = _start(x)
    best, floor = place.point, x.new_zeros(())
    for _ in range(STEPS):
        if _farthest(x, place.point) < _farthest(x, best):
            best = place.point
        floor = torch.maximum(floor, _floor(x, place.price[0] - place.price[1]))
        if _farthest(x, best) - floor <= GAP * floor:
            break
        ahead = _step(place, [-s * p for s, p in zip(place.slack, place.price, strict=True)])
        target = (_gap_after(place, ahead) / place.gap) ** 3 * place.gap / place.count
        wanted = [target - s * p - ds * dp for s, p, ds, dp in zip(place.slack, place.price, ahead[1], ahead[2], strict=True)]
        moved = _walked(place, _step(place, wanted), SHORT)
        if not all(bool(torch.isfinite(t).all()) for t in (moved.point, *moved.slack, *moved.price)):
            break  # as far as rounding lets it go
        place = moved
    return best, floor


def _floor(x: Tensor, y: Tensor) -> Tensor:
    """A proof: sum(y x) = sum(y (x - c)) for every c."""
    y = y - y.mean(0)
    return (y * x).sum() / y.abs().amax(-1).sum().clamp_min(torch.finfo(x.dtype).tiny)


def _start(x: Tensor) -> _Place:
    """The mean, all slacks well inside and all multipliers equal: every equation of the program holds, and each step keeps that."""
    tokens = x.shape[0]
    point = x.new_zeros(x.shape[1])
    room = x.abs().amax()
    u = x.abs() + room
    slack = (u - (x - point), u + (x - point), u.sum(-1).amax() + room - u.sum(-1))
    half = torch.full_like(x, 0.5 / tokens)
    return _Place(point, slack, (half, half, x.new_full((tokens,), 1.0 / tokens)))


def _step(place: _Place, wanted: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Newton's step towards slack x price = slack x price + wanted: the changes of the point, the slacks and the prices."""
    above, below, rows = (p / s for p, s in zip(place.price, place.slack, strict=True))
    r_above, r_below, r_rows = (w / s for w, s in zip(wanted, place.slack, strict=True))
    both, lean = above + below, (above - below) / (above + below)
    weight = rows / (1 + rows * (1 / both).sum(-1))
    pull = (r_rows + rows * ((r_above + r_below) / both).sum(-1)) / (1 + rows * (1 / both).sum(-1))
    matrix = torch.diag((4 * above * below / both).sum(0)) + lean.mT @ (weight[:, None] * lean)
    column = lean.mT @ weight
    system = torch.cat([torch.cat([matrix, column[:, None]], 1), torch.cat([column, weight.sum()[None]])[None]])
    right = torch.cat([(r_above - r_below - lean * (r_above + r_below)).sum(0) + lean.mT @ pull, pull.sum()[None]])
    root = system.diagonal().sqrt()
    solved = torch.linalg.solve_ex(system / root[:, None] / root, right / root)[0] / root
    dx, dt = solved[:-1], solved[-1]
    d_rows = pull - weight * dt - weight * (lean @ dx)
    du = (r_above + r_below - d_rows[:, None]) / both - lean * dx
    slack = [du + dx, du - dx, dt - du.sum(-1)]
    return dx, slack, [r_above - above * slack[0], r_below - below * slack[1], d_rows]


def _gap_after(place: _Place, step: tuple[Tensor, list[Tensor], list[Tensor]]) -> float:
    return max(_walked(place, step, 1.0).gap, 0.0)


def _walked(place: _Place, step: tuple[Tensor, list[Tensor], list[Tensor]], share: float) -> _Place:
    """As far as slacks and prices stay positive, or a whole step."""
    dx, slack, price = step
    far, dear = share * _reach(place.slack, slack), share * _reach(place.price, price)
    moved = [tuple(a + length * b for a, b in zip(old, new, strict=True)) for old, new, length in
             ((place.slack, slack, min(far, 1.0)), (place.price, price, min(dear, 1.0)))]  # fmt: skip
    return _Place(place.point + min(far, 1.0) * dx, *moved)  # type: ignore[arg-type]


def _reach(old: tuple[Tensor, ...], change: list[Tensor]) -> float:
    """How many steps until one becomes zero."""
    return min(float((-a / b).masked_fill(b >= 0, torch.inf).amin()) for a, b in zip(old, change, strict=True))
