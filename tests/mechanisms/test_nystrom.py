"""Nystrom: three dense float64 matrices with torch's own pseudo-inverse between them are the truth."""

import pytest
import torch
from comparing import off, run

from heedful.attention import Mask, Unsupported
from heedful.mechanisms import Nystrom, Softmax
from heedful.mechanisms.nystrom import damped_inverse, segment_means
from heedful.ops import plain

LENGTHS = (70, 47)
REAL = torch.arange(70) < torch.tensor(LENGTHS)[:, None]
SHUFFLED = torch.stack([REAL[0], REAL[1, torch.randperm(70, generator=torch.Generator().manual_seed(3))]])


def tensors(queries=70, keys=70, std=2.0, batch=2):
    return [torch.randn(batch, 3, tokens, 16) * s for tokens, s in ((queries, std), (keys, std), (keys, 1))]


def means(x, landmarks):
    """(batch, heads, landmarks, dim) by a plain loop: token i of n belongs to stretch i * landmarks // n."""
    n = x.shape[-2]
    stretch = torch.arange(n) * landmarks // n
    return torch.stack([x[:, :, stretch == s].mean(-2) for s in range(landmarks)], -2)


def published(q, k, v, landmarks, inverse=torch.linalg.pinv):
    """softmax(q k'^T) softmax(q' k'^T)^+ softmax(q' k^T) v for one text without padding, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    asked, kept = means(q, landmarks), means(k, landmarks)
    left, middle, right = ((a @ b.mT / q.shape[-1] ** 0.5).softmax(-1) for a, b in ((q, kept), (asked, kept), (asked, k)))
    return left @ (inverse(middle) @ (right @ v))


@pytest.mark.parametrize("queries, keys", [(70, 70), (50, 93), (64, 64)])
def test_it_equals_the_published_formula_with_its_gradients(queries, keys):
    inputs = [t.double() for t in tensors(queries, keys, std=3.0)]
    found = run(Nystrom(8, ridge=1e-7), *inputs)
    for one, other in zip(found, run(lambda *qkv: published(*qkv, 8), *inputs), strict=True):
        assert off(one, other) < 1e-4


@pytest.mark.parametrize("ridge", [0.01, 0.1])
def test_damping_leaves_what_all_values_share(ridge):
    q, k, v = tensors()
    v = v + 100
    centre = v.mean(-2, keepdim=True).double()
    wanted = published(q, k, v - centre, 16, lambda a: damped_inverse(a, ridge)) + centre
    assert off(Nystrom(16, ridge)(q, k, v) - centre, wanted - centre) < 1e-3
    assert off(Nystrom(16, ridge)(q, k, v), wanted) < 1e-6


@pytest.mark.parametrize("garbage", [0.0, 1e30, torch.nan])
@pytest.mark.parametrize("real", [REAL, REAL.flip(-1), SHUFFLED], ids=["right", "left", "between"])
def test_each_text_is_attended_as_if_it_were_alone_and_had_no_padding(real, garbage):
    inputs = tensors()
    for t in inputs[1:]:
        t.masked_fill_(~real[:, None, :, None], garbage)

    def alone(q, k, v):
        found = torch.zeros_like(q)
        for i, own in enumerate(real):
            found[i : i + 1, :, own] = Nystrom(16)(*(t[i : i + 1, :, own] for t in (q, k, v)))
        return found

    def padded(q, k, v):
        return Nystrom(16)(q, k, v, Mask(keys=real)) * real[:, None, :, None]

    for one, other in zip(run(padded, *inputs), run(alone, *inputs), strict=True):
        assert off(one, other) < 1e-5


def test_what_lies_in_padded_queries_changes_no_real_one():
    q, k, v = tensors()
    before = Nystrom(16)(q, k, v, Mask(keys=REAL))
    q[1, :, 47:] = 1e4
    assert torch.equal(Nystrom(16)(q, k, v, Mask(keys=REAL))[1, :, :47], before[1, :, :47])


@pytest.mark.parametrize("count", [0, 1, 15, 16])
def test_no_more_keys_than_landmarks_make_it_exact(count):
    real = torch.arange(70) < torch.tensor([[70], [count]])
    inputs = tensors()
    found = run(lambda *qkv: Nystrom(16)(*qkv, Mask(keys=real))[1:], *inputs)
    wanted = run(lambda *qkv: Softmax()(*qkv, Mask(keys=real))[1:], *inputs)
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 1e-5 or other.abs().max() == one.abs().max() == 0


@pytest.mark.parametrize("queries, keys", [(16, 70), (70, 16), (1, 1), (5, 9)])
def test_short_calls_are_exact(queries, keys):
    q, k, v = tensors(queries, keys)
    assert off(Nystrom(16)(q, k, v), Softmax()(q, k, v)) < 1e-6


def test_more_landmarks_come_closer_to_softmax():
    q, k, v = tensors(400, 400, std=1.0)
    q, k = (torch.nn.functional.avg_pool1d(t.flatten(0, 1).mT, 9, 1, 4).mT.view_as(t) * 3 for t in (q, k))  # neighbours are alike
    errors = [off(Nystrom(m)(q, k, v), Softmax()(q, k, v)) for m in (4, 16, 64, 200)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.15


@pytest.mark.parametrize("std", [0.01, 0.3, 8.0])
def test_equal_or_distant_landmarks_are_undone_without_noise(std):
    """Near 0 all rows of the middle matrix are one row, so that its inverse does not exist."""
    q, k, v = tensors(std=std)
    found = run(Nystrom(16), q, k, v)
    with plain():
        wanted = run(Nystrom(16), *(t.double() for t in (q, k, v)))
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 2e-5
    if std == 0.01:
        assert off(found[0], Softmax()(q, k, v)) < 0.01


def test_the_inverse_is_torch_s_pseudo_inverse_with_its_gradient():
    a = torch.randn(3, 6, 6, dtype=torch.float64).add_(3 * torch.eye(6)).softmax(-1)
    weights = torch.randn(3, 6, 6, dtype=torch.float64)
    found, wanted = (run_matrix(f, a, weights) for f in (lambda a: damped_inverse(a, 1e-5), torch.linalg.pinv))
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 1e-6
    assert torch.autograd.gradcheck(lambda a: damped_inverse(a, 0.1), (a.requires_grad_(),))


def run_matrix(f, a, weights):
    a = a.detach().clone().requires_grad_()
    out = f(a)
    return out, *torch.autograd.grad((out * weights).sum(), a)


def test_damping_counts_small_singular_values_by_the_ridge():
    u, _, w = torch.linalg.svd(torch.randn(5, 5, dtype=torch.float64))
    s = torch.tensor([1.0, 0.5, 0.1, 1e-4, 0.0], dtype=torch.float64)
    wanted = w.mT @ torch.diag(s / (s**2 + 1e-4)) @ u.mT
    assert off(damped_inverse(u @ torch.diag(s) @ w, 0.01), wanted) < 1e-9


@pytest.mark.parametrize("tokens", [16, 17, 31, 70])
def test_stretches_take_each_real_token_once(tokens):
    x = torch.eye(70)[None, None]
    found = segment_means(x, (torch.arange(70) < tokens)[None], 16)[0, 0]
    assert torch.allclose(found.sum(-1), torch.ones(16))
    assert ((found > 0).sum(0) == (torch.arange(70) < tokens)).all()
    sizes = (found > 0).sum(-1)
    assert sizes.max() - sizes.min() <= 1


def test_gradients_pass_gradcheck():
    q, k, v = (torch.randn(2, 1, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keys = torch.arange(9) < torch.tensor([[9], [6]])
    assert torch.autograd.gradcheck(lambda *qkv: Nystrom(4)(*qkv, Mask(keys=keys)), (q, k, v))


def test_a_causal_call_is_refused_with_what_can_do_it():
    with pytest.raises(Unsupported, match=r"Nystrom cannot honour a causal mask; use .*Reformer\(\)"):
        Nystrom()(*tensors(), Mask(causal=True))


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"landmarks": 0}, "landmarks is 0; it must be a whole number of at least 1"),
        ({"landmarks": 2.5}, r"landmarks is 2\.5; it must be"),
        ({"ridge": 0.0}, r"ridge is 0\.0; it must be above 0"),
        ({"ridge": float("nan")}, "ridge is nan; it must be above 0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(settings, needed):
    with pytest.raises(ValueError, match=needed):
        Nystrom(**settings)
