"""Pieces: one kernel call each equals hops and a merge, and the dense matrix."""

import pytest
import torch

from heedful.ops.pieces import Piece, composed, joined

PIECES = [
    Piece(1, lambda x: x, lambda x: x[:, :, :5]),
    Piece(1, lambda x: x[:, :, 3:], lambda x: x[:, :, 5:9], True),
    Piece(2, lambda x: x[:, :, :8].unflatten(2, (2, 4)), lambda x: x[:, :, 9:].unflatten(2, (2, 2)), added=torch.randn(4, 2)),
]


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("width", [8, 5, 11])
def test_one_kernel_call_a_piece_equals_hops_and_a_merge(dtype, near, width):
    qkv = [torch.randn(2, 3, n, d).to(dtype).requires_grad_() for n, d in ((12, 8), (13, 8), (13, width))]
    found, wanted = joined(*qkv, PIECES, 0.3), composed(*(t.double() for t in qkv), PIECES, 0.3)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=near, rtol=near)
    weights = torch.randn_like(wanted)
    grads = [torch.autograd.grad((out * weights).sum(), qkv) for out in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=3 * near, rtol=3 * near)


def test_pieces_equal_the_dense_matrix():
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (12, 13, 13))
    logits = torch.full((12, 13), -torch.inf, dtype=torch.float64)
    logits[:, :5] = 0
    logits[3:, 5:9] = torch.zeros(9, 4, dtype=torch.float64).masked_fill(~torch.ones(9, 4).tril().bool(), -torch.inf)
    for block in range(2):
        logits[4 * block : 4 * block + 4, 9 + 2 * block : 11 + 2 * block] = PIECES[2].added
    wanted = (q @ k.mT + logits).softmax(-1) @ v
    torch.testing.assert_close(composed(q, k, v, PIECES, 1.0), wanted)


def test_second_derivatives_equal_those_of_hops_and_a_merge():
    roots = [torch.randn(2, 3, n, 8, requires_grad=True) for n in (12, 13, 13)]
    found = []
    for call, dtype in ((joined, torch.float32), (composed, torch.float64)):
        out = call(*(1.5 * t.to(dtype) for t in roots), PIECES, 0.3)
        slopes = torch.autograd.grad(out.square().sum(), roots, create_graph=True)
        found.append(torch.autograd.grad(sum(s.square().sum() for s in slopes), roots))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
