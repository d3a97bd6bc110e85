"""A hop is exact attention with its log-normaliser, whatever runs it."""

import dense
import pytest
import torch

from heedful.attention import Mask
from heedful.ops import hop, plain

CALLS = dense.calls()
by_call = pytest.mark.parametrize("mask, queries, keys", [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
SCALE = 0.4


def leaves(queries, keys, dtype=torch.float32, with_bias=True):
    q, k, v = dense.tensors(queries, keys, dtype=dtype)
    bias = torch.randn(dense.BATCH, dense.HEADS, keys, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = [q, k, v, *([bias.to(torch.promote_types(dtype, torch.float32))] if with_bias else [])]
    return [t.requires_grad_() for t in found]


def answer(call, args, mask, cap=None):
    """(out, lse) and the gradients of a number made of both."""
    args = [a.detach().clone().requires_grad_() for a in args]
    q, k, v, *bias = args
    out, lse = call(q, k, v, bias[0] if bias else None, mask, SCALE, cap)
    g = torch.Generator().manual_seed(1)
    mix = torch.randn(out.shape, generator=g, dtype=torch.float64), torch.randn(lse.shape, generator=g, dtype=torch.float64)
    seen = lse.detach() > -1e30
    ((out.double() * mix[0]).sum() + (lse.double()[seen] * mix[1][seen]).sum()).backward()
    return out, lse, [a.grad for a in args]


def alike(found, truth, tolerance):
    out, lse, grads = found
    true_out, true_lse, true_grads = truth
    close = {"rtol": tolerance, "atol": tolerance * 3}
    torch.testing.assert_close(out.double(), true_out, **close)
    torch.testing.assert_close(lse.double(), true_lse, **close)
    for grad, true in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(
            grad.double(), true, rtol=tolerance * 10, atol=tolerance * 10 * float(true.abs().max().clamp_min(1))
        )


@by_call
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_out_lse_and_every_gradient_equal_the_dense_matrix(mask, queries, keys, with_bias):
    args = leaves(queries, keys, with_bias=with_bias)
    truth = answer(dense.hop, [a.double() for a in args], mask)
    alike(answer(hop, args, mask), truth, 2e-6)
    with plain():
        alike(answer(hop, args, mask), truth, 2e-6)


@by_call
def test_a_soft_cap_is_honoured(mask, queries, keys):
    args = leaves(queries, keys)
    alike(answer(hop, args, mask, 1.5), answer(dense.hop, [a.double() for a in args], mask, 1.5), 2e-6)


@pytest.mark.parametrize("name", ["everything", "causal", "causal padding left", "window sinks padding left", "bias", "rule"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float64, 1e-10)])
def test_other_dtypes_keep_their_precision(name, dtype, tolerance):
    mask = dense.MASKS[name](17, 17)
    args = leaves(17, 17, dtype)
    found = answer(hop, args, mask)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.promote_types(dtype, torch.float32)
    alike(found, answer(dense.hop, [a.double() for a in args], mask), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_log_weight_is_not_rounded_to_half_precision(dtype):
    q, k, v = dense.tensors(8, 16, dtype=dtype)
    bias = torch.linspace(-40, -37, 16).expand(dense.BATCH, dense.HEADS, 16)
    out, lse = hop(q, k, v, bias, scale=SCALE)
    true, true_lse = dense.hop(q.double(), k.double(), v.double(), bias.double(), Mask(), SCALE)
    torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=2e-2)
    torch.testing.assert_close(out.double(), true, rtol=2e-2, atol=2e-2)


def test_queries_that_see_no_key_give_zero_and_send_no_gradient():
    real = torch.zeros(dense.BATCH, 6, dtype=torch.bool)
    real[1, 2:] = True
    for mask in (Mask(keys=real), Mask(keys=real, causal=True), Mask(keys=real, window=2)):
        args = leaves(6, 6)
        out, lse, grads = answer(hop, args, mask)
        assert (out[0] == 0).all()
        assert (lse[0] == -torch.inf).all()
        assert all(g[0].abs().max() == 0 and g.isfinite().all() for g in grads)


def test_a_batch_of_nothing_gives_nothing():
    q, k, v = (torch.zeros(0, 2, 5, 4, requires_grad=True) for _ in range(3))
    out, lse = hop(q, k, v)
    assert out.shape == (0, 2, 5, 4)
    assert lse.shape == (0, 2, 5)
    (out.sum() + lse.sum()).backward()


def test_no_keys_at_all_give_zero_and_minus_infinity():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    out, lse = hop(q, k, k)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert hop(k, q, q)[0].shape == (1, 2, 0, 4)


@pytest.mark.parametrize("name", ["causal", "bias", "window", "rule", "padding left"])
def test_blocks_of_a_long_call_join_without_a_seam(name, monkeypatch):
    import importlib

    mask, args = dense.MASKS[name](40, 40), leaves(40, 40)
    truth = answer(dense.hop, [a.double() for a in args], mask)
    monkeypatch.setattr(importlib.import_module("heedful.ops.fused"), "BLOCK", 16)
    alike(answer(hop, args, mask), truth, 2e-6)
    monkeypatch.setattr(importlib.import_module("heedful.ops.formula"), "TILE", 40 * 8 * 7)
    with plain():
        alike(answer(hop, args, mask), truth, 2e-6)


@pytest.mark.parametrize("shape", [(1, 4, 17, 17), (1, 1, 17, 17), (2, 4, 1, 17), (1, 4, 17, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_learned_bias_gets_its_gradient(shape, padded):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    grads = []
    for call, dtype in ((hop, torch.float32), (dense.hop, torch.float64)):
        bias = given.to(dtype).clone().requires_grad_()
        q, k, v = dense.tensors(17, 17, dtype=dtype)
        mask = Mask(bias=bias, keys=dense.padding(17) if padded else None, causal=padded)
        if call is dense.hop:
            mask = Mask(keys=mask.keys, causal=mask.causal)
            seen = mask.dense(17, 17)
            out, lse = torch.empty(0), torch.empty(0)
            found = q @ dense.spread(k, 4).mT * SCALE + bias + seen
            out, lse = found.softmax(-1) @ dense.spread(v, 4), found.logsumexp(-1)
        else:
            out, lse = hop(q, k, v, None, mask, SCALE)
        (out.square().sum() + lse.sum()).backward()
        grads.append(bias.grad)
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=2e-5, atol=2e-5 * float(grads[1].abs().max()))


@pytest.mark.parametrize("name", ["causal", "padding left", "bias", "window"])
def test_the_plain_formula_passes_gradcheck(name):
    q, k, v = dense.tensors(4, 5, dtype=torch.float64)
    mask = dense.MASKS[name](4, 5)
    bias = torch.randn(1, dense.HEADS, 5, dtype=torch.float64)
    args = [t[:1].clone().requires_grad_() for t in (q, k, v, bias)]
    mask = mask.entry(1) if mask.keys is not None else mask
    assert torch.autograd.gradcheck(lambda *a: hop(*a, mask=mask, scale=SCALE, cap=2.0), args)


def second(call, args, mask, used):
    """The gradients of the size of the gradients, asked for the roots that the leaves are made from."""
    roots = [a.detach().clone().requires_grad_() for a in args]
    q, k, v, bias = (r * 1.5 for r in roots)
    out, lse = call(q, k, v, bias, mask, SCALE)
    number = {"out": out.square().sum(), "lse": lse.masked_fill(lse == -torch.inf, 0).square().sum()}
    slopes = torch.autograd.grad(sum(number[u] for u in used), roots, create_graph=True, allow_unused=True)
    return torch.autograd.grad(
        sum(s.square().sum() for s in slopes if s is not None), roots, materialize_grads=True, allow_unused=True
    )


@pytest.mark.parametrize("used", [("out",), ("lse",), ("out", "lse")], ids=str)
@pytest.mark.parametrize("name", ["everything", "causal padding left", "window sinks padding left", "rule"])
def test_second_derivatives_equal_those_of_the_dense_matrix(name, used):
    mask, args = dense.MASKS[name](17, 17), leaves(17, 17)
    truth = second(dense.hop, [a.double() for a in args], mask, used)
    for grad, true in zip(second(hop, args, mask, used), truth, strict=True):
        torch.testing.assert_close(grad.double(), true, rtol=1e-4, atol=1e-5 * float(true.abs().max().clamp_min(1)))


def test_inputs_stay_as_they_were():
    args = [t.detach() for t in leaves(9, 21)]
    before = [t.clone() for t in args]
    hop(*args, Mask(keys=dense.padding(21)), SCALE)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 1e-45])
@pytest.mark.parametrize("name", ["everything", "causal", "causal padding left", "window"])
def test_any_scale_will_do(name, scale, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", scale)
    mask, args = dense.MASKS[name](17, 17), leaves(17, 17)
    alike(answer(hop, args, mask), answer(dense.hop, [a.double() for a in args], mask), 2e-6)


def test_transposed_views_are_taken_as_they_are():
    q, k, v = dense.tensors(17, 17)
    views = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    truth = answer(dense.hop, [t.double() for t in views], Mask(causal=True))
    alike(answer(hop, views, Mask(causal=True)), truth, 2e-6)


def test_only_the_lse_may_be_asked_to_differentiate():
    q, k, v = (t.requires_grad_() for t in dense.tensors(17, 17))
    hop(q, k, v, scale=SCALE)[1].sum().backward()
    true = [t.detach().double().requires_grad_() for t in (q, k, v)]
    dense.hop(*true, None, Mask(), SCALE)[1].sum().backward()
    torch.testing.assert_close(q.grad.double(), true[0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k.grad.double(), true[1].grad, rtol=1e-5, atol=1e-5)
    assert v.grad is None or v.grad.abs().max() == 0


@pytest.mark.parametrize(
    "shapes, words",
    [
        (((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)), "dimensions"),
        (((1, 2, 3, 5), (1, 2, 3, 4), (1, 2, 3, 4)), "must agree"),
        (((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)), "differ in"),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), "use a multiple of 2"),
    ],
)
def test_tensors_that_are_no_call_are_refused_at_the_door(shapes, words):
    with pytest.raises(ValueError, match=words):
        hop(*(torch.zeros(s) for s in shapes))


@pytest.mark.parametrize("size", [1.0, 0.0, 1e-20], ids=["all rows learn", "one row by lse alone", "one row next to nothing"])
def test_both_outputs_pass_their_gradients_on_whatever_the_other_s_size(size):
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    given, given_lse = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40)
    given[:, :, 7] *= size

    def gradients(q, k, v):
        return torch.autograd.grad(hop(q, k, v), (q, k, v), (given.to(q), given_lse.to(q)))

    wanted = gradients(*(t.detach().double().requires_grad_() for t in (q, k, v)))
    for one, other in zip(gradients(q, k, v), wanted, strict=True):
        assert torch.allclose(one.double(), other, atol=2e-5)
