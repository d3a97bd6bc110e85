"""Residual: each centre is best in its own norm, and the composite norm is none."""

import pytest
import torch

from heedful.exact import Centre, composite_norm, l1_centre, residual


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NORMS = {
    "mean": [torch.linalg.matrix_norm, lambda x: torch.linalg.matrix_norm(x, 2)],
    "median": [lambda x: torch.linalg.matrix_norm(x, 1)],
    "l1": [lambda x: torch.linalg.matrix_norm(x, torch.inf)],
}


@pytest.mark.parametrize("center", NORMS)
@pytest.mark.parametrize("seed", range(5))
def test_no_other_row_is_better_in_its_norm(center, seed):
    x = drawn(9, 4, seed=seed)
    best = residual(x, center)
    for norm in NORMS[center]:
        for other in [*(drawn(9, 4, seed=seed).mean(0) + 0.3 * drawn(300, 4, seed=seed + 50)), *(1e-3 * drawn(300, 4, seed=seed))]:
            assert norm(best) <= norm(best - other) * (1 + 1e-9)


@pytest.mark.parametrize("center", NORMS)
def test_the_mean_is_within_a_factor_of_the_best(center):
    for seed in range(20):
        x = drawn(6, 3, seed=seed) ** 3
        for norm in [*NORMS["median"], *NORMS["l1"], composite_norm]:
            assert norm(residual(x)) <= 2 * (1 - 1 / 6) * norm(residual(x, center)) + 1e-12


def test_the_factor_of_the_mean_is_reached():
    x = torch.zeros(8, 1, dtype=torch.float64)
    x[0] = 1
    assert torch.linalg.matrix_norm(residual(x), 1) == 2 * (1 - 1 / 8) * torch.linalg.matrix_norm(residual(x, "median"), 1)


@pytest.mark.parametrize("center", NORMS)
def test_a_batch_is_its_parts_and_a_shift_or_a_scale_goes_along(center):
    x = drawn(3, 7, 4)
    found = residual(x, center)
    for part, own in zip(x, found, strict=True):
        torch.testing.assert_close(residual(part, center), own)
    torch.testing.assert_close(residual(5 * x + drawn(4), center), 5 * found, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 3), (2, 5), (4, 1), (12, 6), (40, 30), (5, 80)])
@pytest.mark.parametrize("kind", ["normal", "whole numbers", "heavy", "repeated"])
def test_the_l1_centre_is_proved_best(shape, kind):
    x = drawn(*shape)
    if kind == "whole numbers":
        x = (2 * x).round()
    elif kind == "heavy":
        x = x / drawn(*shape, seed=1).abs().clamp_min(1e-3)
    elif kind == "repeated":
        x = x[torch.randint(shape[0], shape[:1], generator=torch.Generator().manual_seed(0))]
    found = l1_centre(x)
    assert found.radius == (x - found.point).abs().sum(-1).amax()
    assert found.radius - found.floor <= 1e-7 * found.radius
    assert found.floor <= found.radius * (1 + 1e-12)


def test_in_two_dims_the_l1_centre_is_that_of_a_turned_square():
    x = drawn(30, 2)
    turned = x @ torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)  # l1 there is the largest coordinate here
    assert torch.isclose(l1_centre(x).radius, (turned.amax(0) - turned.amin(0)).amax() / 2)


@pytest.mark.parametrize("seed", range(3))
def test_the_l1_centre_is_that_of_a_solver_of_linear_programs(seed):
    optimize = pytest.importorskip("scipy.optimize")
    x = drawn(10, 4, seed=seed)
    n, d = x.shape
    eye, rows = torch.eye(n * d).double(), torch.eye(n).repeat_interleave(d, 1).double()  # variables: centre, u, t
    each = torch.eye(d).repeat(n, 1).double()
    above = torch.cat([-each, -eye, torch.zeros(n * d, 1)], 1)
    below = torch.cat([each, -eye, torch.zeros(n * d, 1)], 1)
    sums = torch.cat([torch.zeros(n, d), rows, -torch.ones(n, 1)], 1)
    cost = torch.zeros(d + n * d + 1)
    cost[-1] = 1
    limits = torch.cat([-x.flatten(), x.flatten(), torch.zeros(n)])
    solved = optimize.linprog(cost.numpy(), torch.cat([above, below, sums]).numpy(), limits.numpy(), bounds=(None, None))
    assert abs(l1_centre(x).radius.item() - solved.fun) < 1e-8


def test_equal_rows_have_no_residual_and_half_precision_stays():
    x = torch.ones(4, 3, dtype=torch.bfloat16)
    for center in NORMS:
        found = residual(x, center)
        assert found.dtype == torch.bfloat16
        assert not found.any()
    assert isinstance(l1_centre(x), Centre)


@pytest.mark.parametrize("n", [2, 16, 100])
def test_the_composite_norm_breaks_the_triangle_inequality(n):
    a = torch.zeros(n, n, dtype=torch.float64)
    a[:, 0] = 1
    ratio = composite_norm(a + a.mT) / (composite_norm(a) + composite_norm(a.mT))
    assert torch.isclose(ratio, torch.tensor((n + 1) / (2 * n**0.5), dtype=torch.float64))


def test_the_composite_norm_is_homogeneous_and_submultiplicative():
    for seed in range(50):
        a, b = drawn(5, 4, seed=seed) ** 3, drawn(4, 6, seed=seed + 99) ** 3
        assert composite_norm(a @ b) <= composite_norm(a) * composite_norm(b) * (1 + 1e-12)
        torch.testing.assert_close(composite_norm(-3 * a), 3 * composite_norm(a))


def test_what_has_no_residual_is_refused():
    x = drawn(4, 3)
    with pytest.raises(ValueError, match="no center 'middle'; give one of mean, median, l1"):
        residual(x, "middle")
    with pytest.raises(ValueError, match="2 numbers that are nan or infinite"):
        residual(x.index_fill(0, torch.tensor([1]), torch.nan)[:, :2])
    with pytest.raises(ValueError, match=r"\(3,\); give \(..., tokens, dim\)"):
        residual(x[0])
    with pytest.raises(ValueError, match="at least one of each"):
        residual(x[:0])
    with pytest.raises(TypeError, match="floating-point"):
        residual(x.long())
