"""The matrix-free operators are the dense ones under every mask, and conjugate gradients solve them."""

import dense
import pytest
import torch
from lessons import lesson_of

from heedful.exact.operators import Fisher, Frobenius, conjugate_gradients
from heedful.mask import Mask
from heedful.statistics.growth import Growth

CALLS = [c for c in dense.calls() if c[2] in (17, 9)]
every_call = pytest.mark.parametrize("name,mask,queries,keys", CALLS, ids=[c[0] for c in CALLS])


def dense_operator(lesson, z, kind):
    p, _ = dense.probabilities(lesson)
    x, y = lesson.augmented[:, None], lesson.keyed[:, None]
    moved = x @ z @ y.mT
    if lesson.cap is not None:
        slope = 1 - torch.tanh(lesson.q @ dense.spread(lesson.k, 4).mT * lesson.scale / lesson.cap).square()
        moved = moved * slope
    force = p * (moved - (p * moved).sum(-1, keepdim=True)) if kind is Fisher else moved * (p > 0)
    force = force if lesson.cap is None else force * slope
    counted = lesson.counted[:, None, :, None]
    return (x.mT @ (force * counted) @ y).sum(0) / lesson.counted.sum()


@pytest.mark.parametrize("kind", [Fisher, Frobenius])
@every_call
def test_it_is_the_dense_one(kind, name, mask, queries, keys):
    lesson, other = lesson_of(mask, queries, keys), lesson_of(mask, queries, keys, seed=1)
    z = torch.randn(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(kind([lesson])(z), dense_operator(lesson, z, kind))
    both = (dense_operator(lesson, z, kind) + dense_operator(other, z, kind)) / 2
    torch.testing.assert_close(kind([lesson, other])(z), both)


@pytest.mark.parametrize("kind", [Fisher, Frobenius])
def test_a_soft_cap_shrinks_what_moves(kind):
    lesson = lesson_of(Mask(causal=True), 17, 17, cap=2.0)
    z = torch.randn(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(kind([lesson])(z), dense_operator(lesson, z, kind))


def test_the_largest_change_is_over_visible_pairs():
    lesson = lesson_of(Mask(causal=True), 17, 17)
    z = torch.randn(4, 6, 5, dtype=torch.float64)
    moved = lesson.augmented[:, None] @ z @ lesson.keyed[:, None].mT
    assert Fisher([lesson]).largest(z) == pytest.approx(float(moved.tril().abs().max()))


def test_with_one_text_the_frobenius_problem_has_a_closed_form():
    lesson = lesson_of(Mask(), 17, 17)
    lesson = type(lesson)(**{**vars(lesson), **{n: vars(lesson)[n][:1] for n in ("q", "k", "v", "states", "gradient", "returned")}})
    n = Growth.of_lesson(lesson, 0).logit_gradient[0] / 17
    x, y = lesson.augmented[0], lesson.keyed[0]
    left, right = torch.linalg.inv(x.mT @ x), torch.linalg.inv(y.mT @ y)
    found = conjugate_gradients(Frobenius([lesson]), n, steps=300, tolerance=1e-12)
    torch.testing.assert_close(found, 17 * left @ n @ right, rtol=1e-6, atol=1e-8)


def test_a_null_direction_of_the_metric_is_left_alone():
    lesson = lesson_of(Mask(), 17, 17)
    z = torch.zeros(4, 6, 5, dtype=torch.float64)
    z[:, -1] = 1.0  # the key bias' place: it adds x_j . 1 to every logit, no constant of the row
    assert Fisher([lesson])(z).abs().max() > 1e-6
    constant = conjugate_gradients(lambda t: torch.zeros_like(t), torch.ones_like(z))
    assert not constant.any()


def test_the_kronecker_metric_is_the_mean_of_the_fisher_over_directions():
    """<Z, A(Z)> = E_i[...] of both sides; with one query the Kronecker product is exact."""
    lesson = lesson_of(Mask(), 1, 33)
    one = type(lesson)(
        **{**vars(lesson), **{n: vars(lesson)[n][:1] for n in ("q", "k", "v", "states", "sources", "gradient", "returned")}}
    )
    z = torch.randn(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(Fisher([one])(z), Growth.of_lesson(one, 0).keys().moved(z))
