"""Softmax: equal to the dense matrix, under every mask, cap and null logit."""

import pytest
import torch

from heedful.attention import Mask
from heedful.mechanisms import Hard, Softmax
from heedful.ops import plain

REAL = torch.arange(40) < torch.tensor([[40], [25]])
MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "padding": Mask(keys=REAL),
    "causal padding": Mask(causal=True, keys=REAL),
    "window": Mask(window=7),
    "sinks": Mask(causal=True, window=7, sinks=2, keys=REAL.flip(-1)),
    "segments": Mask(segments=torch.arange(40).expand(2, -1) // 9),
    "bias": Mask(bias=torch.linspace(-3, 3, 40 * 40).view(1, 1, 40, 40)),
}


def tensors(std=1.0):
    return [torch.randn(2, 3, 40, 8) * std for _ in range(3)]


def dense(q, k, v, mask, scale, cap=None, null=None):
    """One softmax over the whole matrix in float64, zero where no key is visible."""
    logits = q.double() @ k.double().mT * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits + mask.dense(q.shape[-2], k.shape[-2])
    if null is not None:
        logits = torch.cat([logits, null.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return logits.softmax(-1).nan_to_num(0)[..., : k.shape[-2]] @ v.double()


@pytest.mark.parametrize("extra", [{}, {"cap": 2.0}, {"null": torch.tensor([-1.0, 0.0, 2.0])}], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_it_equals_the_dense_matrix(mask, extra):
    q, k, v = tensors()
    torch.testing.assert_close(
        Softmax()(q, k, v, mask, **extra).double(), dense(q, k, v, mask, 8**-0.5, **extra), atol=3e-6, rtol=1e-5
    )


def test_beta_multiplies_the_logits():
    q, k, v = tensors()
    torch.testing.assert_close(Softmax(beta=3.0)(q, k, v), Softmax()(3 * q, k, v))
    torch.testing.assert_close(Softmax(beta=3.0)(q, k, v, scale=0.1), Softmax()(q, k, v, scale=0.3))


def test_a_large_beta_is_hard_attention():
    q, k, v = tensors()
    torch.testing.assert_close(Softmax(beta=1e5)(q, k, v), Hard()(q, k, v), atol=1e-3, rtol=0)


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_a_beta_that_is_not_positive_is_refused(beta):
    with pytest.raises(ValueError, match=r"must be above 0"):
        Softmax(beta=beta)


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_formula_calls_no_kernel(causal, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    with plain():
        assert Softmax()(*tensors(), Mask(causal=causal)).isfinite().all()


def test_values_of_another_width_need_no_matrix_of_all_pairs(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)  # torch's call would hold it
    q, k, v = tensors()
    torch.testing.assert_close(Softmax()(q, k, v[..., :5]).double(), dense(q, k, v[..., :5], Mask(), 8**-0.5), atol=3e-6, rtol=1e-5)
