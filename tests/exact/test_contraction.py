"""Contraction: norms and coefficients are those of dense matrices, for layers, paths and calls that are never written out."""

import pytest
import torch

from heedful import Capture, Mask
from heedful.exact import centred_norm, dobrushin, frozen_contraction, one_head
from heedful.exact.singular import norms


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(*shape, seed=0, size=2.0):
    return (size * drawn(*shape, seed=seed)).softmax(-1)


@pytest.mark.parametrize("shape", [(4, 4), (9, 3), (3, 9), (30, 30)])
def test_the_norms_of_many_maps_at_once_are_those_of_the_matrices(shape):
    a = drawn(2, *shape)
    found = norms(lambda x: a @ x, lambda y: a.mT @ y, drawn(2, shape[1], 1, seed=1))
    torch.testing.assert_close(found, torch.linalg.matrix_norm(a, 2))


def test_maps_that_end_at_different_steps_do_not_disturb_each_other():
    a = torch.stack([torch.zeros(8, 8).double(), torch.eye(8).double(), drawn(8, 2) @ drawn(2, 8, seed=1), drawn(8, 8, seed=2)])
    found = norms(lambda x: a @ x, lambda y: a.mT @ y, drawn(4, 8, 1, seed=3))
    torch.testing.assert_close(found, torch.linalg.matrix_norm(a, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    p, maps = attention(2, 6, 6).to(dtype), drawn(2, 4, 5).to(dtype)
    for found, wide in (
        (dobrushin(p), dobrushin(p.float())),
        (centred_norm(p), centred_norm(p.float())),
        (frozen_contraction(p, maps), frozen_contraction(p.float(), maps.float())),
    ):
        torch.testing.assert_close(found, wide.to(dtype))


@pytest.mark.parametrize("heads", [1, 3])
def test_frozen_contraction_is_the_norm_of_the_whole_linear_map(heads):
    p, maps = attention(heads, 6, 6), drawn(heads, 4, 5)
    centre = torch.eye(6).double() - 1 / 6
    dense = sum(torch.kron(centre @ a, m.mT.contiguous()) for a, m in zip(p, maps, strict=True))
    torch.testing.assert_close(frozen_contraction(p, maps), torch.linalg.matrix_norm(dense, 2))
    rest = drawn(6, 4, seed=7)
    assert (centre @ (p @ rest @ maps).sum(0)).norm() <= frozen_contraction(p, maps) * rest.norm()


def test_dobrushin_is_the_largest_total_variation_and_bounds_the_range_of_columns():
    p, x = attention(2, 7, 7), drawn(7, 5, seed=3)
    brute = torch.stack([torch.stack([(a - b).abs().sum() / 2 for a in one for b in one]).amax() for one in p])
    torch.testing.assert_close(dobrushin(p), brute)
    reach = [(y.amax(-2) - y.amin(-2)) for y in (x, p @ x)]
    assert (reach[1] <= dobrushin(p)[:, None] * reach[0] + 1e-12).all()
    assert (dobrushin(p) <= 1).all()


def test_on_a_path_the_product_is_meant_last_layer_leftmost():
    path = [attention(6, 6, seed=s) for s in range(4)]
    whole = path[3] @ path[2] @ path[1] @ path[0]
    assert torch.equal(dobrushin(path), dobrushin(whole))
    torch.testing.assert_close(centred_norm(path), torch.linalg.matrix_norm(whole - whole.mean(0), 2))
    assert dobrushin(path) < torch.stack([dobrushin(p) for p in path]).prod()


def test_a_column_that_all_look_at_stretches_differences():
    p = torch.full((64, 64), 1e-3, dtype=torch.float64)
    p[:32, 0] = 1
    p = p / p.sum(-1, keepdim=True)
    assert centred_norm(p) > 2
    assert dobrushin(p) < 1


def call(seed=0, tokens=9, heads=4, mask=None, cap=None):
    q, k, v = drawn(3, 1, heads, tokens, 5, seed=seed)
    shared = heads // 2
    return Capture(f"layer {seed}", 2 * q, k[:, :shared], v[:, :shared], mask or Mask(), 0.4, cap)


def dense(capture):
    k = capture.k.repeat_interleave(2, 1)
    logits = capture.q @ k.mT * capture.scale
    logits = logits if capture.cap is None else capture.cap * torch.tanh(logits / capture.cap)
    return (logits + capture.mask.dense(*logits.shape[-2:])).softmax(-1)[0]


MASKS = [Mask(), Mask(causal=True), Mask(causal=True, window=3), Mask(bias=drawn(1, 4, 9, 9, seed=8))]


@pytest.mark.parametrize("mask", MASKS, ids=["every", "causal", "window", "bias"])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_calls_are_read_as_products_under_any_mask(mask, cap):
    path = [call(seed, mask=mask, cap=cap) for seed in range(3)]
    torch.testing.assert_close(centred_norm(path[0]), centred_norm(dense(path[0])))
    torch.testing.assert_close(centred_norm(path), centred_norm([dense(c) for c in path]))
    torch.testing.assert_close(centred_norm([path[0], dense(path[1])[0]]), centred_norm([dense(path[0]), dense(path[1])[0]]))


def test_one_head_of_a_call_is_that_head():
    made = call(mask=Mask(bias=drawn(1, 4, 9, 9)))
    torch.testing.assert_close(
        centred_norm([one_head(made, 3), one_head(made, 1)]), centred_norm([dense(made)[3:4], dense(made)[1:2]])
    )


def test_a_call_in_single_precision_is_read_in_double():
    q, k = drawn(2, 1, 1, 600, 4).float()
    p = (q.double() @ k.double().mT).softmax(-1)[0]
    torch.testing.assert_close(centred_norm(Capture("layer", q, k, k)), centred_norm(p))


def test_what_is_no_attention_is_refused():
    p = attention(5, 5)
    with pytest.raises(ValueError, match="square attention matrices"):
        dobrushin(drawn(4, 5))
    with pytest.raises(ValueError, match="nan or infinite"):
        centred_norm(p * torch.nan)
    with pytest.raises(ValueError, match="at least one layer"):
        dobrushin([])
    with pytest.raises(ValueError, match="as many tokens in each"):
        centred_norm([p, attention(4, 4)])
    with pytest.raises(ValueError, match="centred_norm, which streams"):
        dobrushin(torch.empty(1).expand(4097, 4097))
    with pytest.raises(ValueError, match=r"p is of 2 heads and the maps have shape \(3, 4, 4\)"):
        frozen_contraction(attention(2, 5, 5), drawn(3, 4, 4))
    with pytest.raises(ValueError, match="no head 4 in layer 0; it has 4"):
        one_head(call(), 4)
    with pytest.raises(ValueError, match="as many tokens in each, and as many heads or 1"):
        centred_norm([call(), call(tokens=8)])
