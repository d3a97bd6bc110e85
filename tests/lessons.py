"""Lessons of random calls, and their growth statistics as dense float64 matrices."""

from __future__ import annotations

import dense
import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.lesson import Lesson
from heedful.mask import Mask

DIM, OUT = 5, 7


def lesson_of(mask: Mask, queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float64, **more) -> Lesson:
    """A random call with states; the queries are the keys' own tokens where they are as many."""
    q, k, v = dense.tensors(queries, keys, seed, dtype)
    g = torch.Generator().manual_seed(seed + 100)
    shapes = ((queries, DIM), (keys, DIM), (dense.HEADS, queries, dense.WIDTH), (queries, OUT))
    x, y, gradient, returned = (torch.randn(dense.BATCH, *s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    own = mask.same(queries, keys)
    return Lesson(
        "layer",
        q,
        k,
        v,
        mask,
        0.3,
        real=mask.keys if own else None,
        states=x,
        sources=None if own else y,
        gradient=gradient,
        returned=returned,
        **more,
    )


def forces(lesson: Lesson) -> tuple[Tensor, Tensor]:
    """P and dL/dS, dense float64: softmax's own derivative, the soft cap's included."""
    p, _ = dense.probabilities(lesson)
    v, gradient = dense.spread(lesson.v, lesson.q.shape[1]).double(), lesson.gradient.double()
    by_p = gradient @ v.mT
    g = p * (by_p - (p * by_p).sum(-1, keepdim=True))
    if lesson.cap is not None:
        raw = lesson.q.double() @ dense.spread(lesson.k, lesson.q.shape[1]).double().mT * lesson.scale
        g = g * (1 - torch.tanh(raw / lesson.cap).square())
    return p, g


def statistics(lesson: Lesson) -> dict[str, Tensor]:
    """The sums of Growth, without folds; heads only."""
    p, g = forces(lesson)
    x, y = lesson.augmented.double()[:, None], lesson.keyed.double()[:, None]
    counted = lesson.counted[:, None, :, None].double()
    mu, kept = p @ y, p * counted
    mixed = p @ F.pad(y, (0, 1), value=1.0)
    return {
        "logit_gradient": (x.mT @ g @ y).sum(0),
        "query_gram": ((x * counted).mT @ x).sum(0)[0],
        "key_gram": (y.mT @ (kept.sum(-2)[..., None] * y) - (mu * counted).mT @ mu).sum(0),
        "mixed_gram": ((mixed * counted).mT @ mixed).sum(0),
        "value_gradient": (mixed.mT @ lesson.returned.double()[:, None]).sum(0),
    }
