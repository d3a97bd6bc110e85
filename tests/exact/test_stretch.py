"""The largest stretch of a layer, of a softmax, and the bend along a query's direction."""

import layers
import pytest
import torch

from heedful import Capture, Mask
from heedful.exact import (
    ColumnAttention,
    attention_jacobian,
    largest_singular,
    local_lipschitz,
    query_curvature,
    softmax_jacobian_norm,
)


@pytest.mark.parametrize("name", [name for name in layers.CASES if name != "long"])
def test_the_lipschitz_constant_is_the_jacobians_norm(name):
    x, layer = layers.CASES[name]()
    truth = float(torch.linalg.matrix_norm(attention_jacobian(x, layer).reshape(len(x) * layers.OUTPUTS, -1), 2))
    found = local_lipschitz(x, layer)
    if truth < 1e-12:  # of one key: nothing moves but by rounding
        assert found.value < 1e-12
        return
    assert found.error <= 1e-3 * found.value
    assert abs(found.value - truth) <= 1e-5 * truth
    sharp = local_lipschitz(x, layer, tolerance=1e-9)
    assert abs(sharp.value - truth) <= 1e-12 * truth
    assert sharp.iterations >= found.iterations


def test_too_few_iterations_say_how_far_off_they_may_be():
    x, layer = layers.CASES["long"]()
    truth = local_lipschitz(x, layer, tolerance=1e-10)
    early = local_lipschitz(x, layer, iterations=2)
    assert early.iterations == 2
    assert early.error > 1e-3 * early.value
    assert early.value <= truth.value


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_maps_that_end_early_are_found_whole(rank):
    m = layers.drawn(0, 9, rank) @ layers.drawn(1, rank, 7)
    found = largest_singular(lambda x: m @ x, lambda y: m.mT @ y, layers.drawn(2, 7), tolerance=0.0)
    assert found.iterations <= rank + 1
    torch.testing.assert_close(found.value, float(torch.linalg.matrix_norm(m, 2)))


def test_many_equal_singular_values_do_not_lead_astray():
    found = largest_singular(lambda x: 2 * x, lambda y: 2 * y, layers.drawn(2, 50), tolerance=1e-12)
    assert abs(found.value - 2) < 1e-14
    assert found.iterations == 1


def test_a_start_without_direction_is_refused():
    with pytest.raises(ValueError, match="no direction"):
        largest_singular(lambda x: x, lambda y: y, torch.zeros(3))


ROWS = {
    "soft": lambda: layers.drawn(0, 40, 9).softmax(-1),
    "hard": lambda: (30 * layers.drawn(0, 40, 9)).softmax(-1),
    "two alike": lambda: torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64),
    "all alike": lambda: torch.full((6,), 1 / 6, dtype=torch.float64),
    "one holds all": lambda: torch.eye(5).double(),
    "zeros": lambda: torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64),
    "one key": lambda: torch.ones(3, 1).double(),
    "no key is seen": lambda: torch.zeros(2, 4).double(),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_the_softmax_jacobians_norm_is_the_dense_one(name):
    p = ROWS[name]()
    truth = torch.linalg.matrix_norm(torch.diag_embed(p) - p[..., None] * p[..., None, :], 2)
    torch.testing.assert_close(softmax_jacobian_norm(p), truth, rtol=1e-12, atol=1e-15)


def test_it_lies_between_the_two_largest_and_is_at_most_a_half():
    p = (3 * layers.drawn(0, 200, 50)).softmax(-1)
    norm, top = softmax_jacobian_norm(p), p.topk(2).values
    assert bool(((norm <= top[:, 0]) & (norm >= top[:, 1]) & (norm <= 0.5)).all())


def test_a_nearly_hard_row_keeps_its_digits():
    small = 2.0**-43  # exact, and so is 1 less it
    p = torch.tensor([1 - small, small], dtype=torch.float64)
    torch.testing.assert_close(
        softmax_jacobian_norm(p)[None], torch.tensor([2 * small * (1 - small)], dtype=torch.float64), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    "p, message", [([0.5, 0.6], "sum to 1"), ([1.5, -0.5], "none negative"), ([torch.nan, 1], "none negative")]
)
def test_what_is_no_probability_is_refused(p, message):
    with pytest.raises(ValueError, match=message):
        softmax_jacobian_norm(torch.tensor(p))


@pytest.mark.parametrize("null", [None, torch.tensor([0.5, -1.0], dtype=torch.float64)])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(keys=torch.tensor([[True, False] * 3]))])
def test_the_second_derivative_is_autograds(mask, null):
    q, dq, k, v = layers.drawn(0, 1, 2, 6, 4), layers.drawn(1, 1, 2, 6, 4), layers.drawn(2, 1, 1, 6, 4), layers.drawn(3, 1, 1, 6, 5)

    def attend(t):
        logits = (q + t * dq) @ k.mT * 0.6 + mask.dense(6, 6)
        some = logits if null is None else torch.cat([logits, null[None, :, None, None].expand(1, 2, 6, 1)], -1)
        return some.softmax(-1)[..., :6] @ v

    truth = torch.func.jacfwd(torch.func.jacfwd(attend))(torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(query_curvature(Capture("l", q, k, v, mask, 0.6, null=null), dq), truth, rtol=1e-12, atol=1e-13)


def test_a_bend_that_has_no_formula_is_refused():
    q = layers.drawn(0, 1, 1, 3, 4)
    with pytest.raises(ValueError, match="soft cap"):
        query_curvature(Capture("l", q, q, q, cap=2.0), q)
    with pytest.raises(ValueError, match="give a direction for each"):
        query_curvature(Capture("l", q, q, q), q[:, :, :2])


@pytest.mark.parametrize("n, m, keys, k", [(3, 4, 4, 2), (2, 3, 5, 4), (1, 1, 1, 1), (4, 1, 3, 2)])
def test_source_003s_gradients_are_right(n, m, keys, k):
    x, y = layers.drawn(0, n, m), layers.drawn(1, n, keys)
    f = ColumnAttention(layers.drawn(2, k, n), layers.drawn(3, k, n), layers.drawn(4, keys, n), 0.8)
    for found, place in ((f.by_x(x, y), 0), (f.by_y(x, y), 1)):
        torch.testing.assert_close(found, torch.func.jacrev(f, place)(x, y), rtol=1e-12, atol=3e-15)
    if m == keys:
        both = torch.func.jacrev(lambda x: f(x, x))(x)
        torch.testing.assert_close(f.by_x(x, x) + f.by_y(x, x), both, rtol=1e-12, atol=1e-14)


def test_source_003s_shapes_are_checked():
    x, a, c = layers.drawn(0, 3, 4), layers.drawn(1, 2, 3), layers.drawn(2, 3, 4)
    with pytest.raises(ValueError, match="C is keys x n"):
        ColumnAttention(a, a, c)(x, x)
    with pytest.raises(ValueError, match="A holds nan"):
        ColumnAttention(a * torch.nan, a, c.mT)(x, x)
