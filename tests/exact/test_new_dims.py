"""New dims: steepest where both folds agree, harmless where asked, and as far as the losses allow."""

import math
from dataclasses import replace

import pytest
import torch
from lessons import lesson_of

from heedful.exact.deciding import growth_score, line_search
from heedful.exact.growing import DAMPINGS, add_head, grow_dk, grow_dv
from heedful.exact.operators import Fisher
from heedful.exact.signal import Signal
from heedful.mask import Mask
from heedful.statistics.growth import Growth


def gram(dim, seed, rows=50, heads=None):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*([] if heads is None else [heads]), rows, dim, generator=g, dtype=torch.float64)
    return x.mT @ x / rows


def signal_of(heads=2, left=6, right=5, rank=3, noise=0.0, seed=0, **more):
    g = torch.Generator().manual_seed(seed)
    n = torch.randn(heads, left, rank, generator=g, dtype=torch.float64) @ torch.randn(
        heads, rank, right, generator=g, dtype=torch.float64
    )
    folds = torch.stack([n, n]) + noise * torch.randn(2, heads, left, right, generator=g, dtype=torch.float64)
    return Signal(folds, gram(left, seed + 1), gram(right, seed + 2, heads=heads), **more)


def test_the_step_is_the_best_of_its_rank_and_length():
    signal = signal_of()
    step = grow_dk(signal, 2, dampings=(0.0,))
    z = step.left @ step.right.mT
    assert float((z * signal.moved(z)).sum() / 2) == pytest.approx(1.0)
    best = signal.strengths(0.0)[:, :2].square().sum()
    assert step.slope == pytest.approx(float((2 * best).sqrt()))  # |z|^2 / heads = 1
    assert step.judged == pytest.approx(step.slope)
    assert step.kept.all()


def test_both_sides_are_even_and_scale_with_the_step():
    step = grow_dk(signal_of(), 2)
    w_q, w_k = step.for_scale(0.09, scale=0.25)
    torch.testing.assert_close(0.25 * w_q @ w_k.mT, 0.09 * step.left @ step.right.mT)


def test_folds_that_disagree_keep_nothing_and_noise_is_judged_as_noise():
    signal = signal_of()
    against = replace(signal, gradient=torch.stack([signal.gradient[0], -signal.gradient[0]]))
    step = grow_dk(replace(against, weights=torch.tensor([2.0, 1.0])), 2)
    assert not step.kept.any()
    assert step.judged < 0
    assert step.slope == 0


def test_noise_asks_for_damping():
    """Where the metric has small eigenvalues it amplifies what is noise there."""
    chosen = []
    weak = torch.diag(torch.logspace(0, -4, 20, dtype=torch.float64))
    for noise in (0.0, 0.1):
        n = weak @ signal_of(heads=4, left=20, right=20, rank=2, seed=3).gradient @ weak
        folds = n + noise * signal_of(heads=4, left=20, right=20, rank=2, noise=1.0, seed=4).gradient.diff(dim=0)
        folds = torch.stack([n[0], folds[0]])
        chosen.append(grow_dk(Signal(folds, weak, weak), 2).damping)
    assert chosen[0] < chosen[1]
    assert set(chosen) <= set(DAMPINGS)


def test_one_fold_alone_is_not_judged():
    signal = signal_of()
    alone = replace(signal, gradient=signal.gradient[:1])
    step = grow_dk(alone, 1)
    assert math.isnan(step.judged)
    assert step.slope > 0


def test_more_dims_than_there_is_signal_for_stay_empty():
    step = grow_dk(signal_of(rank=1), 3, dampings=(0.0,))
    assert step.kept.sum(-1).tolist() == [1, 1]
    assert not step.left[:, :, 1:].any()


def test_the_fisher_metric_steps_further_down_than_its_kronecker_product():
    lessons = [lesson_of(Mask(causal=True), 17, 17, seed=s) for s in range(4)]
    total = Growth.of_lesson(lessons[0], 0)
    for i, lesson in enumerate(lessons[1:], 1):
        total = total + Growth.of_lesson(lesson, i % 2)
    signal, fisher = total.keys(), Fisher(lessons)
    slopes = {}
    for name, operator in (("fisher", fisher), ("kronecker", None)):
        z = signal.descent(signal.whole, 0.01, operator)
        slopes[name] = -float((signal.whole * z).sum()) / float((z * fisher(z)).sum()) ** 0.5
    assert slopes["fisher"] > slopes["kronecker"]


def test_shared_key_heads_get_one_new_key_column():
    signal = signal_of(heads=4, left_shared=2)
    step = grow_dk(signal, 2)
    assert torch.equal(step.right[0], step.right[1])
    assert not torch.equal(step.right[1], step.right[2])
    assert not torch.equal(step.left[0], step.left[1])
    assert step.slope > 0


def test_shared_value_heads_get_one_new_value_column():
    signal = replace(signal_of(heads=4, left=6), left=gram(6, 9, heads=4), right=None, right_shared=2)
    step = grow_dv(signal, 2)
    assert torch.equal(step.left[0], step.left[1])
    assert not torch.equal(step.right[0], step.right[1])
    with pytest.raises(ValueError, match="cannot share in groups of 3"):
        signal_of(heads=4, left_shared=3)


def test_preserving_columns_change_nothing_and_have_the_old_size():
    signal = signal_of()
    query, key = grow_dk(signal, 2).preserving(1.5)
    assert not key.any()
    torch.testing.assert_close((query * (signal.left @ query)).sum(1), torch.full((2, 2), 2.25, dtype=torch.float64))


def test_value_dims_descend_by_what_the_metric_says():
    signal = Signal(signal_of().gradient, gram(6, 4, heads=2))
    step = grow_dv(signal, 2, dampings=(0.0,))
    z = step.left @ step.right.mT
    assert step.slope == pytest.approx(-float((signal.whole * z).sum()))
    steepest = -torch.linalg.inv(signal.left) @ signal.whole
    assert float((steepest * z).sum()) > 0


def test_a_new_head_takes_the_pattern_that_gains_most():
    strong, weak = (Signal(scale * signal_of(heads=1).gradient, gram(6, 4)) for scale in (3.0, 1.0))
    copies = Signal(0.1 * signal_of(heads=2).gradient, gram(6, 4, heads=2))
    found = add_head({"self": weak, "previous": strong, "copy": copies}, 2)
    assert found.pattern == "previous"
    assert set(found.gains) == {"self", "previous", "copy 0", "copy 1"}
    assert found.gains["previous"] == pytest.approx(3 * found.gains["self"])
    assert found.dims.left.shape == (1, 6, 2)


def test_what_the_present_dims_do_counts_for_nothing():
    signal = signal_of(rank=2)
    u, _, vh = torch.linalg.svd(signal.whole, full_matrices=False)
    nothing = growth_score(signal, *(torch.zeros(2, n, 1, dtype=torch.float64) for n in (6, 5)), 2)
    had = growth_score(signal, torch.linalg.solve(signal.left, u[..., :2]), torch.linalg.solve(signal.right, vh[:, :2].mT), 2, 0.0)
    assert (had < 1e-20).all()
    torch.testing.assert_close(nothing, signal.strengths()[:, :2].square().sum(-1))


@pytest.mark.parametrize(
    "curve", [lambda g: 2 - g + 3 * g**2, lambda g: 2 - g + 0.1 * g**2, lambda g: 2 - math.tanh(g) + 0.2 * g**2]
)
def test_a_line_search_comes_near_the_lowest_point(curve):
    found = line_search(curve, slope=1.0, start=2.0)
    lowest = min(curve(i / 1000) for i in range(8000))
    assert found.accepted
    assert len(found.tried) <= 6
    assert found.realised >= 0.95 * (2 - lowest)


def test_a_step_that_brings_too_little_is_refused():
    assert not line_search(lambda g: 2 + g, slope=1.0, start=2.0).accepted
    assert not line_search(lambda g: math.nan, slope=1.0, start=2.0).accepted
    assert not line_search(lambda g: 2 - 0.1 * g, slope=1.0, start=2.0).accepted
    assert not line_search(lambda g: 1.0, slope=-1.0, start=2.0).tried
    assert max(g for g, _ in line_search(lambda g: 2 - g, 1.0, 2.0, largest=0.2).tried) == 0.2


@pytest.mark.parametrize("new,dampings,words", [(0, DAMPINGS, "0 new dims"), (1, (), "no damping")])
def test_bad_input_is_named(new, dampings, words):
    with pytest.raises(ValueError, match=words):
        grow_dk(signal_of(), new, dampings=dampings)
    broken = replace(signal_of(), gradient=signal_of().gradient * torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        grow_dk(broken, 1)
