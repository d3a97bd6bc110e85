"""Performer: the estimator as published, in float64 and without any stabiliser, is the truth at every scale."""

import copy
import warnings

import pytest
import torch
from comparing import off, run
from torch import nn

from heedful.attention import Mask
from heedful.mechanisms import Performer
from heedful.mechanisms.directions import KINDS, sample
from heedful.mechanisms.performer import OFTEN
from heedful.ops import plain, spans
from heedful.ops.favor import FusedFavor, favor, folded, formula, two_hops
from heedful.ops.favor_causal import favor_causal

quiet = pytest.mark.filterwarnings("ignore:Performer")
kinds = pytest.mark.parametrize("kind", KINDS)


def published(q, k, v, directions, scale, mask):
    """phi(x) = exp(w.x - |x|^2/2), weights phi(x).phi(y) over their sum: a whole matrix in float64."""
    x, y, v, w = q.double() * scale**0.5, k.double() * scale**0.5, v.double(), directions.double()
    asked, kept = (torch.exp(t @ w.mT - t.square().sum(-1, keepdim=True) / 2) for t in (x, y))
    weights = asked @ kept.mT * mask.dense(q.shape[-2], k.shape[-2]).exp()
    return (weights / weights.sum(-1, keepdim=True)).nan_to_num(0) @ v


@quiet
@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=True), Mask(keys=(torch.arange(200) < 150)[None])], ids=["none", "causal", "padding"]
)
@pytest.mark.parametrize("std", [0.25, 0.5, 1, 2, 4, 8])
def test_it_equals_the_published_estimator_at_any_scale(std, mask):
    performer, (q, k, v) = Performer(features=100), torch.randn(3, 1, 2, 200, 50)
    performer.prepare(2, 50)
    found = run(lambda *qkv: performer(*qkv, mask), q * std, k * std, v)
    wanted = run(lambda q, k, v: published(q, k, v, performer.projection, 50**-0.5, mask), q * std, k * std, v)
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_more_features_come_closer_to_softmax(causal):
    q, k, v = torch.randn(3, 1, 2, 100, 16)
    q, k, mask = q / 3, k / 3, Mask(causal=causal)
    exact = (q @ k.mT / 4 + mask.dense(100, 100)).softmax(-1) @ v
    errors = [off(Performer(features)(q, k, v, mask), exact) for features in (16, 256, 4096)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.03


@kinds
def test_the_kernel_is_estimated_without_bias(kind):
    x = torch.randn(6) / 3
    estimates = [float((sample(kind, 12, 6, seed) @ x).exp().mean()) for seed in range(2000)]
    assert sum(estimates) / 2000 == pytest.approx(float((x @ x / 2).exp()), rel=0.02)


@kinds
def test_directions_depend_on_the_seed_alone(kind):
    torch.manual_seed(5)
    first = sample(kind, 20, 8, seed=3)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert torch.equal(sample(kind, 20, 8, seed=3), first)
    assert not torch.equal(sample(kind, 20, 8, seed=4), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.dtype == torch.float32


@kinds
@pytest.mark.parametrize("features", [1, 5, 8, 21])
def test_any_number_of_directions_can_be_had(kind, features):
    assert sample(kind, features, 8, seed=0).shape == (features, 8)


def test_orthogonal_directions_stand_at_right_angles_in_each_block():
    blocks = sample("orthogonal", 24, 8, seed=0).view(3, 8, 8)
    angles = nn.functional.normalize(blocks, dim=-1)
    torch.testing.assert_close(angles @ angles.mT, torch.eye(8).expand(3, 8, 8), atol=1e-5, rtol=0)


def test_simplex_directions_stand_equally_far_apart():
    angles = nn.functional.normalize(sample("simplex", 8, 8, seed=0), dim=-1)
    torch.testing.assert_close(angles @ angles.mT, torch.eye(8) * (1 + 1 / 7) - 1 / 7, atol=1e-5, rtol=0)


def test_simplex_directions_refuse_one_dimension():
    with pytest.raises(ValueError, match="at least 2"):
        sample("simplex", 4, 1, seed=0)


def test_antithetic_directions_come_in_opposite_pairs():
    pairs = sample("antithetic", 16, 8, seed=0).view(8, 2, 8)
    assert torch.equal(pairs[:, 0], -pairs[:, 1])


@quiet
@pytest.mark.parametrize("std", [0.3, 3.0])
def test_formula_hops_and_own_backward_agree(std):
    q, k, v = torch.randn(3, 2, 3, 65, 10)
    keys = torch.rand(2, 65) > 0.3
    w = torch.randn(20, 10) * 10**-0.25

    def by(op):
        def attend(q, k, v):
            x, y, values, lows = folded(q, k, v, 10**-0.5, keys)
            return op(x, y, values, w, lows)

        return run(attend, q * std, k * std, v)

    fused = by(lambda x, y, values, w, lows: FusedFavor.apply(x, y, values, w, lows.detach(), 10**-0.5))
    for other in (by(formula), by(two_hops)):
        for one, two in zip(fused, other, strict=True):
            assert off(one, two) < 1e-5


@pytest.mark.parametrize("op", [favor, favor_causal])
def test_gradients_pass_gradcheck(op, monkeypatch):
    monkeypatch.setattr(spans, "CHUNK", 4)
    monkeypatch.setattr(spans, "SPAN", 2)
    q, k, v = (torch.randn(2, heads, 11, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    w, keys = torch.randn(6, 3, dtype=torch.float64), torch.arange(11) < torch.tensor([[11], [7]])
    assert torch.autograd.gradcheck(lambda q, k, v: op(q, k, v, w, 0.7, keys), (q, k, v))


@pytest.mark.parametrize("op", [favor, favor_causal])
def test_learned_directions_get_their_gradient(op):
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: op(q, k, v, w, 0.5), (w,))


@pytest.mark.parametrize("op", [favor, favor_causal])
def test_a_second_derivative_is_right(op, monkeypatch):
    monkeypatch.setattr(spans, "CHUNK", 4)
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    w, keys = torch.randn(4, 3, dtype=torch.float64), torch.arange(5)[None] < 4
    assert torch.autograd.gradgradcheck(lambda q, k, v: op(q, k, v, w, 0.7, keys), (q, k, v))
    assert torch.autograd.gradgradcheck(lambda q: op(q, k.detach(), v.detach(), w, 0.7), (q,))


@quiet
@pytest.mark.parametrize("chunk, span", [(8, 1), (8, 3), (16, 2), (64, 16)])
def test_chunks_of_any_size_give_one_answer(chunk, span, monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 100, 8) * 2
    wanted = run(lambda *qkv: Performer(32)(*qkv, Mask(causal=True)), q, k, v)
    monkeypatch.setattr(spans, "CHUNK", chunk)
    monkeypatch.setattr(spans, "SPAN", span)
    for one, other in zip(run(lambda *qkv: Performer(32)(*qkv, Mask(causal=True)), q, k, v), wanted, strict=True):
        assert off(one, other) < 1e-5


@quiet
def test_a_small_key_after_smaller_and_before_huge_ones_is_not_lost():
    """The maximum of a chunk comes from its last key, e^400 above the first: those rows need smaller chunks."""
    performer, (q, k, v) = Performer(32), torch.randn(3, 1, 1, 130, 8)
    k[:, :, :60] *= 25  # a long key has a small log-weight -|y|^2/2
    k[:, :, 60:] *= 0.1
    found = performer(q, k, v, Mask(causal=True))
    assert off(found[:, :, 60:], published(q, k, v, performer.projection, 8**-0.5, Mask(causal=True))[:, :, 60:]) < 1e-5
    with plain():
        wanted = performer(q.double(), k.double(), v.double(), Mask(causal=True))
    assert off(found[:, :, :60], wanted[:, :, :60]) < 1e-4


@quiet
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("garbage", [torch.inf, -torch.inf, torch.nan])
def test_not_even_a_nan_gets_out_of_the_padding(garbage, causal):
    performer, (q, k, v) = Performer(32), torch.randn(3, 1, 2, 30, 8)
    mask = Mask(causal=causal, keys=(torch.arange(30) < 20)[None])
    wanted = run(lambda *qkv: performer(*qkv, mask), q, k, v)
    k[:, :, 20:], v[:, :, 20:] = garbage, garbage
    for one, other in zip(run(lambda *qkv: performer(*qkv, mask), q, k, v), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_negative_scale_is_refused():
    q, k, v = torch.randn(3, 1, 1, 5, 4) / 4
    with pytest.raises(ValueError, match="scale"):
        Performer(8)(q, k, v, scale=-1.0)


def test_it_warns_once_where_random_features_are_meaningless():
    q, k, v = torch.randn(3, 1, 2, 30, 64)
    performer = Performer(64)
    with pytest.warns(UserWarning, match=r"Performer's 64 random features tell little.*Softmax\(\)"):
        performer(q * 2, k * 2, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(250):
            performer(q * 2, k * 2, v)


def test_it_does_not_warn_for_short_vectors_nor_for_what_lies_in_the_padding():
    q, k, v = torch.randn(3, 1, 2, 30, 64) / 3
    k[:, :, 10:] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Performer(64)(q, k, v, Mask(keys=(torch.arange(30) < 10)[None]))
        Performer(64)(q, q, v)


def test_a_later_call_is_looked_at_too():
    q, k, v = torch.randn(3, 1, 2, 30, 64) / 3
    performer = Performer(64)
    performer(q, k, v)
    performer.calls = OFTEN  # one look each so many calls
    with pytest.warns(UserWarning, match="random features"):
        performer(q * 9, k * 9, v)


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"features": 0}, "features is 0; it must be a whole number of at least 1"),
        ({"features": 2.5}, r"features is 2\.5; it must be a whole number"),
        ({"directions": "gaussian"}, "directions is 'gaussian'; it must be one of orthogonal, iid, simplex, antithetic"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(settings, needed):
    with pytest.raises(ValueError, match=needed):
        Performer(**settings)


class Host(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.attention = Performer(**settings)


def test_its_directions_are_saved_and_loaded_inside_a_model():
    host, fresh = Host(features=16, seed=1), Host(features=16, seed=2)
    assert "attention.projection" not in host.state_dict()
    host.attention.prepare(2, 8)
    fresh.load_state_dict(host.state_dict())
    fresh.attention.prepare(2, 8)
    assert torch.equal(fresh.attention.projection, host.attention.projection)
    other = Host(features=16)
    other.load_state_dict(host.state_dict(), assign=True)
    assert torch.equal(other.attention.projection, host.attention.projection)


def test_directions_of_another_number_are_not_loaded():
    host = Host(features=16)
    host.attention.prepare(2, 8)
    with pytest.raises(RuntimeError, match="size mismatch"):
        Host(features=32).load_state_dict(host.state_dict())


def test_a_resized_head_gets_new_directions():
    performer = Performer(16)
    performer.prepare(2, 8)
    performer.prepare(4, 6)
    assert performer.projection.shape == (16, 6)


def test_directions_stay_float32_in_a_half_model():
    performer = Performer(16)
    performer.prepare(2, 8)
    before = performer.projection.clone()
    assert torch.equal(performer.half().projection, before)
    assert torch.equal(performer.double().projection, before)
    assert performer.to("meta").projection.is_meta


def test_it_can_be_copied():
    performer, (q, k, v) = Performer(16), torch.randn(3, 1, 2, 9, 8) / 4
    out = performer(q, k, v)
    assert torch.equal(copy.deepcopy(performer)(q, k, v), out)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=["none", "causal"])
def test_torch_func_transforms_pass_through(mask):
    performer, (q, k, v) = Performer(16), torch.randn(3, 1, 2, 9, 8) / 4
    performer.prepare(2, 8)
    found = torch.func.grad(lambda q: performer(q, k, v, mask).sum())(q)
    _, wanted, *_ = run(lambda *qkv: performer(*qkv, mask), q, k, v)
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all()


@quiet
def test_decoding_shares_key_heads_and_keeps_half_precision_outside_only():
    performer, q, (k, v) = Performer(32), torch.randn(2, 4, 90, 8), torch.randn(2, 2, 2, 90, 8)
    wanted, state, parts = performer(q, k, v, Mask(causal=True)), None, []
    for new in (slice(0, 70), slice(70, 71), slice(71, 90)):
        out, state = performer.decode(*(t[:, :, new].half() for t in (q, k, v)), state)
        parts.append(out)
    assert state.sums.shape == (2, 2, 32, 9)
    assert state.sums.dtype == torch.float32
    assert parts[0].dtype == torch.float16
    assert off(torch.cat(parts, 2), wanted) < 5e-3


def test_decoding_refuses_a_negative_scale():
    q, k, v = torch.randn(3, 1, 1, 5, 4) / 4
    with pytest.raises(ValueError, match="scale"):
        Performer(8).decode(q, k, v, scale=-1.0)
