"""FittedPerformer: its estimates are unbiased whatever it was fitted to, and closer where the fit is right."""

import copy

import pytest
import torch

from heedful.attention import Capture, Mask
from heedful.mechanisms import FittedPerformer, Performer
from heedful.mechanisms.directions import sample
from heedful.mechanisms.moments import Moments
from heedful.mechanisms.proposals import PROPOSALS, balance

pytestmark = pytest.mark.filterwarnings("ignore:Performer")
proposals = pytest.mark.parametrize("proposal", PROPOSALS)
HEADS, LENGTH, DIM = 3, 120, 6
REAL = torch.arange(LENGTH) < torch.tensor([[LENGTH], [70]])


def call(seed=0, std=1.0, mask=None, key_heads=HEADS, **rest):
    """A call whose queries and keys lie off centre, long along some axes and short along others."""
    torch.manual_seed(seed)
    stretched = torch.linspace(0.2, 2, DIM)
    q = (torch.randn(2, HEADS, LENGTH, DIM) * stretched + 1) * std
    k = (torch.randn(2, key_heads, LENGTH, DIM) / stretched.sqrt() - 2) * std
    return Capture("layer", q, k, torch.randn(2, key_heads, LENGTH, 5), mask or Mask(), DIM**-0.5, **rest)


def exact(c):
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (c.k, c.v))
    return (c.q @ k.mT * c.scale + c.mask.dense(LENGTH, LENGTH)).softmax(-1) @ v


def off(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def probabilities(c):
    return (c.q.double() @ c.k.double().mT * c.scale + c.mask.dense(LENGTH, LENGTH)).softmax(-1)


@proposals
def test_estimates_of_the_kernel_are_unbiased(proposal):
    """exp(x . y) for x = A q and y = A^-T (k - centre), float64: the mean over many draws comes to it."""
    c = call(std=0.4)
    fitted = FittedPerformer(8, proposal=proposal).fit([c])
    x, y = fitted.stretched(c.q[:1, :, :4].double(), c.k[:1, :, :4].double(), c.scale)
    seen = Moments.of([c], 200, 0)
    sums = seen.queries @ fitted.stretch.mT.double() + (seen.keys - fitted.centre[:, None]) @ fitted.shrink.double()
    noise = sample("iid", 400_000, DIM, seed=1).double()
    w, weights = PROPOSALS[proposal](noise, sums, sums.square().mean(1))
    asked = torch.exp(x @ w.mT - x.square().sum(-1, keepdim=True) / 2 + weights[:, None])
    estimate = asked @ torch.exp(y @ w.mT - y.square().sum(-1, keepdim=True) / 2).mT / len(noise)
    assert torch.allclose(estimate, torch.exp(x @ y.mT), rtol=0.03)


@proposals
def test_logits_differ_from_the_callers_by_a_constant_for_each_query(proposal):
    c = call()
    x, y = FittedPerformer(8, proposal=proposal).fit([c]).stretched(c.q.double(), c.k.double(), c.scale)
    gap = x @ y.mT - c.q.double() @ c.k.double().mT * c.scale
    assert float((gap - gap.mean(-1, keepdim=True)).abs().max()) < 1e-4


@proposals
@pytest.mark.parametrize("causal", [False, True])
def test_more_features_come_closer_to_softmax(proposal, causal):
    c = call(std=0.5, mask=Mask(causal=causal))
    errors = [off(FittedPerformer(n, proposal=proposal).fit([c])(c.q, c.k, c.v, c.mask), exact(c)) for n in (16, 256, 4096)]
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]
    assert errors[2] < 0.05


@proposals
def test_a_fit_lowers_the_error_on_other_tokens(proposal):
    judged = call(seed=1)

    def error(kind, **settings):
        made = [kind(64, seed=seed, **settings) for seed in range(5)]
        for mechanism in made:
            if kind is FittedPerformer:
                mechanism.fit([call(seed=2), call(seed=3)])
        return sum(off(m(judged.q, judged.k, judged.v), exact(judged)) for m in made) / 5

    assert error(FittedPerformer, proposal=proposal) < 0.7 * error(Performer)


def test_before_a_fit_it_is_performer():
    c = call(std=0.5)
    for mask in (Mask(), Mask(causal=True), Mask(keys=REAL)):
        wanted = Performer(32, seed=3)(c.q, c.k, c.v, mask)
        torch.testing.assert_close(FittedPerformer(32, seed=3)(c.q, c.k, c.v, mask), wanted, atol=1e-5, rtol=1e-4)


@proposals
def test_one_seed_gives_one_fit(proposal):
    torch.manual_seed(1)
    first = FittedPerformer(16, proposal=proposal).fit([call()])
    torch.manual_seed(2)
    before = torch.get_rng_state()
    call_again = call()
    torch.set_rng_state(before)
    again = FittedPerformer(16, proposal=proposal).fit([call_again])
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@proposals
def test_a_fit_is_saved_loaded_copied_and_stays_float32(proposal):
    c = call()
    fitted = FittedPerformer(16, proposal=proposal).fit([c])
    wanted, fresh = fitted(c.q, c.k, c.v), FittedPerformer(16, proposal=proposal)
    fresh.load_state_dict(fitted.state_dict())
    for one in (fresh, copy.deepcopy(fitted), fitted.half()):
        assert torch.equal(one(c.q, c.k, c.v), wanted)
    with pytest.raises(RuntimeError, match="size mismatch"):
        FittedPerformer(32).load_state_dict(fitted.state_dict())


@pytest.mark.parametrize("causal", [False, True])
def test_the_moments_are_those_of_dense_attention(causal):
    c = call(mask=Mask(causal=causal, keys=REAL), real=REAL)
    seen, p = Moments.of([c], 50, 0), probabilities(c) * REAL[:, None, :, None]
    x, y, count = c.q.double() * c.scale**0.5, c.k.double() * c.scale**0.5, REAL.sum()
    mean_x, mean_y = (x * REAL[:, None, :, None]).sum((0, 2)) / count, (p @ y).sum((0, 2)) / count
    torch.testing.assert_close(seen.query_mean, mean_x)
    torch.testing.assert_close(seen.key_mean, mean_y)
    x, y = x - mean_x[:, None], y - mean_y[:, None]
    torch.testing.assert_close(seen.key_cov, torch.einsum("bhij,bhjd,bhje->hde", p, y, y) / count)
    torch.testing.assert_close(seen.cross_cov, torch.einsum("bhid,bhij,bhje->hde", x, p, y) / count)
    torch.testing.assert_close(seen.query_cov, torch.einsum("bhi,bhid,bhie->hde", p.sum(-1), x, x) / count)


def test_pairs_are_drawn_as_attention_draws_them():
    c = call(mask=Mask(keys=REAL), real=REAL)
    seen = Moments.of([c], 20_000, 0)
    torch.testing.assert_close(seen.keys.mean(1), seen.key_mean, atol=0.03, rtol=0)
    torch.testing.assert_close(seen.queries.mean(1), seen.query_mean, atol=0.03, rtol=0)
    sums = (seen.queries * seen.keys).sum(-1).mean(-1)
    wanted = seen.cross_cov.diagonal(dim1=-2, dim2=-1).sum(-1) + (seen.query_mean * seen.key_mean).sum(-1)
    torch.testing.assert_close(sums, wanted, atol=0.05, rtol=0)


def test_padding_and_what_lies_in_it_play_no_part():
    c = call(mask=Mask(keys=REAL), real=REAL)
    wanted = FittedPerformer(16).fit([c]).state_dict()
    c.k[1, :, 70:], c.v[1, :, 70:] = torch.nan, torch.nan
    found = FittedPerformer(16).fit([c])
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in wanted.items())
    inputs = [t.requires_grad_() for t in (c.q, c.k, c.v)]
    out = found(*inputs, c.mask)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out[REAL[:, None].expand(-1, HEADS, -1)].sum(), inputs))


def test_key_heads_that_are_shared_are_fitted_for_each_query_head():
    c = call(key_heads=1)
    fitted = FittedPerformer(16).fit([c])
    assert fitted.centre.shape == (HEADS, DIM)
    spread = Capture("layer", c.q, *(t.repeat_interleave(HEADS, 1) for t in (c.k, c.v)), c.mask, c.scale)
    again = FittedPerformer(16).fit([spread])
    assert torch.equal(fitted(c.q, c.k, c.v), again(spread.q, spread.k, spread.v))


def test_balanced_queries_and_keys_are_equally_long():
    x, y = (t @ t.mT for t in torch.randn(2, 3, 5, 5, dtype=torch.float64))
    g = balance(x, y)
    torch.testing.assert_close(g, g.mT)
    torch.testing.assert_close(g @ x @ g, y)


def test_bad_settings_and_captures_are_refused():
    with pytest.raises(ValueError, match="proposal is 'gauss'; it must be one of gaussian, attention, normal"):
        FittedPerformer(proposal="gauss")
    with pytest.raises(ValueError, match="no capture"):
        FittedPerformer().fit([])
    with pytest.raises(ValueError, match="give those of one layer"):
        FittedPerformer().fit([call(), call(key_heads=1)])


def test_a_fit_is_not_lost_to_another_number_of_heads():
    fitted, fresh = FittedPerformer(16).fit([call()]), FittedPerformer(16)
    with pytest.raises(ValueError, match="fitted to 3 heads of 6 dims; fit a new one to 2 heads of 6 dims"):
        fitted.prepare(2, DIM)
    fresh.prepare(3, DIM)
    fresh.prepare(2, DIM)
    assert fresh.centre.shape == (2, DIM)


def test_constant_keys_can_be_fitted_too():
    c = call()
    c.k[:] = 1
    out = FittedPerformer(16).fit([c])(c.q, c.k, c.v)
    assert off(out, exact(c)) < 1e-4


def test_captures_of_padding_alone_are_refused_and_among_others_teach_nothing():
    q, k, v = torch.randn(3, 1, 2, 30, 8)
    real, blank = (Capture("layer", q, k, v, Mask(keys=torch.full((1, 30), there)), 0.3) for there in (True, False))
    with pytest.raises(ValueError, match="a head whose queries see no key, as where all is padding; give captures of real tokens"):
        FittedPerformer(features=16).fit([blank])
    one, other = (FittedPerformer(features=16).fit(captures) for captures in ([real], [real, blank]))
    assert torch.allclose(one.centre, other.centre)


def test_captures_of_a_negative_scale_are_refused():
    q, k, v = torch.randn(3, 1, 2, 30, 8)
    with pytest.raises(ValueError, match=r"a capture has the scale -0\.3; random features need one of at least 0"):
        FittedPerformer(features=16).fit([Capture("layer", q, k, v, scale=-0.3)])
