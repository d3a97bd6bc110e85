"""Low rank: the curves equal dense singular values in float64, the projection's error its formula; nothing large is built."""

import dense
import pytest
import torch

from heedful.attention import Capture, Mask
from heedful.exact import (
    attention_matrix,
    effective_rank,
    jl_error,
    projected,
    rank_errors,
    rank_needed,
    singular_values,
    streamed_rank_errors,
)
from heedful.exact.dense import check_room


def call(tokens=60, name="everything", dtype=torch.float64):
    q, k, v = dense.tensors(tokens, tokens, dtype=dtype)
    return Capture("layer", q, k, v, (dense.MASKS | dense.SQUARE)[name](tokens, tokens), 0.4)


def probabilities(capture):
    """P with the rows of tokens alone."""
    return dense.probabilities(capture)[0] * capture.rows.valid[:, None, :, None]


@pytest.mark.parametrize("name", list(dense.MASKS | dense.SQUARE))
def test_the_matrix_is_the_one_of_the_formula_under_every_mask(name):
    capture = call(name=name)
    torch.testing.assert_close(attention_matrix(capture), dense.probabilities(capture)[0], rtol=0, atol=1e-14)


def test_rank_errors_are_those_of_the_best_matrices_of_that_rank():
    p = torch.randn(3, 20, 12, dtype=torch.float64).softmax(-1)
    u, s, vh = torch.linalg.svd(p, full_matrices=False)
    for rank, error in enumerate(rank_errors(p).unbind(-1)):
        best = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]
        truth = (p - best).norm(dim=(-2, -1)) / p.norm(dim=(-2, -1))
        torch.testing.assert_close(error, truth, rtol=1e-9, atol=1e-14)


def test_the_rank_needed_loses_no_more_than_asked_and_one_less_does():
    p = torch.randn(4, 30, 30, dtype=torch.float64).mul(3).softmax(-1)
    for error in (0.01, 0.1, 0.5):
        for curve, rank in zip(rank_errors(p), rank_needed(p, error), strict=True):
            assert curve[rank] <= error < curve[rank - 1]
    assert rank_needed(p, 1.0).tolist() == [0] * 4


def test_the_mean_error_of_random_projections_is_the_formula():
    p, w = torch.randn(12, 12, dtype=torch.float64).softmax(-1), torch.randn(12, 5, dtype=torch.float64)
    r = torch.randn(40_000, 3, 12, dtype=torch.float64) / 3**0.5
    errors = ((p @ r.mT) @ (r @ w) - p @ w).square().sum((-2, -1))
    torch.testing.assert_close(errors.mean(), jl_error(p, w, 3), rtol=0.03, atol=0)  # 40,000 draws: 1 % off one time in three


def test_nothing_has_no_error_and_half_precision_is_computed_in_float32():
    assert rank_errors(torch.zeros(3, 3)).tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(rank_errors(torch.eye(4).half()), rank_errors(torch.eye(4)).half())


def test_a_projection_is_the_same_for_a_seed_and_shrinks_as_said():
    p, w = torch.eye(40, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)
    assert torch.equal(projected(p, w, 5), projected(p, w, 5))
    assert not torch.equal(projected(p, w, 5), projected(p, w, 5, seed=1))
    assert jl_error(p, w, 10) == jl_error(p, w, 5) / 2


@pytest.mark.parametrize("name", list(dense.MASKS | dense.SQUARE))
def test_streamed_singular_values_are_those_of_the_dense_matrix_under_every_mask(name):
    capture = call(name=name)
    truth = torch.linalg.svdvals(probabilities(capture))
    found = singular_values(capture, 6)
    torch.testing.assert_close(found, truth[..., :6], rtol=0.01, atol=1e-6)
    assert (found <= truth[..., :6] * (1 + 1e-9)).all()
    squares = truth.square()
    torch.testing.assert_close(effective_rank(capture), squares.sum(-1) / squares[..., 0], rtol=5e-3, atol=0)


def test_rows_of_padding_do_not_count():
    q, k, v = dense.tensors(30, 30, dtype=torch.float64)
    real = dense.padding(30)
    capture = Capture("layer", q, k, v, Mask(keys=real), 0.4, real=real)
    truth = torch.linalg.svdvals(probabilities(capture))
    torch.testing.assert_close(singular_values(capture, 2), truth[..., :2], rtol=1e-6, atol=0)
    torch.testing.assert_close(effective_rank(capture), truth.square().sum(-1) / truth[..., 0].square(), rtol=1e-6, atol=0)


def test_all_singular_values_may_be_asked_for():
    capture = call(20)
    torch.testing.assert_close(singular_values(capture, 20), torch.linalg.svdvals(probabilities(capture)), rtol=1e-8, atol=1e-9)


def test_streamed_rank_errors_bound_the_dense_ones_and_nearly_meet_them():
    capture = call(120, "causal", torch.float32)
    found, truth = streamed_rank_errors(capture, 10), rank_errors(probabilities(capture))[..., :11]
    assert (found >= truth - 1e-5).all()
    torch.testing.assert_close(found, truth, rtol=0.02, atol=1e-3)


def test_inputs_are_left_as_they_were_and_need_no_graph():
    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    assert not singular_values(Capture("layer", q, k, v), 2).requires_grad


@pytest.mark.parametrize(
    "ask, said",
    [
        (lambda: singular_values(call(9), 10), "10 singular values of 9 keys were asked for; give 1 to 9"),
        (lambda: singular_values(call(9), 0), "0 singular values"),
        (lambda: rank_needed(torch.eye(3), float("nan")), "an error of nan was asked for"),
        (lambda: jl_error(torch.eye(3), torch.ones(3, 1), 0), "a projection to 0 dims was asked for; use a rank of at least 1"),
        (lambda: jl_error(torch.eye(3), torch.ones(4, 1), 2), r"P is \(3, 3\) and w \(4, 1\); give"),
        (lambda: check_room(1e16, "a matrix", "do without"), "a matrix would take 1e.07 GB, and .* GB are free; do without"),
    ],
)
def test_bad_input_is_told(ask, said):
    with pytest.raises(ValueError, match=said):
        ask()


def test_a_dense_matrix_of_a_long_text_is_refused_before_any_work():
    q, k, v = (torch.zeros(1, 1, 1, 4).expand(1, 1, 2_000_000, 4) for _ in range(3))
    with pytest.raises(ValueError, match=r"1 attention matrices of 2000000 x 2000000 would take 3.2e\+04 GB.*singular_values"):
        attention_matrix(Capture("layer", q, k, v, Mask(causal=True)))
