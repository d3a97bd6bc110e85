"""The hop under a window in chunks equals the hop in tiles: out, lse and gradients."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from heedful.attention import Mask
from heedful.ops import hop, plain
from heedful.ops.window import chunk_size, window_hop

LEFT = (torch.arange(330) < torch.tensor([[330], [111], [5], [0]])).flip(-1)
MASKS = {
    "window": Mask(window=30),
    "causal": Mask(causal=True, window=30),
    "sinks": Mask(causal=True, window=30, sinks=3),
    "sinks ahead": Mask(window=30, sinks=3, keys=LEFT),
    "left padding": Mask(causal=True, window=30, sinks=3, keys=LEFT),
    "right padding": Mask(causal=True, window=150, keys=LEFT.flip(-1)),
    "packed texts": Mask(causal=True, window=70, sinks=2, segments=torch.arange(330).expand(4, -1) // 111),
}


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("name", MASKS)
def test_out_lse_and_gradients_equal_those_of_the_hop(name, key_heads):
    mask = MASKS[name]
    q, k, v = torch.randn(4, 4, 330, 8), torch.randn(4, key_heads, 330, 8), torch.randn(4, key_heads, 330, 6)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    assert chunk_size(q, k, mask)
    weights = torch.randn(4, 4, 330, 7)
    results = []
    for attend in (window_hop, hop):
        out, lse = attend(q, k, v, mask=mask, scale=0.5)
        blind = lse == -torch.inf
        loss = (out * weights[..., :6]).sum() + (lse.masked_fill(blind, 0) * weights[..., 6]).sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=3e-5)


def test_transforms_and_float64_take_the_same_path():
    q, k, v = torch.randn(3, 3, 2, 200, 8, dtype=torch.float64)
    mask = Mask(causal=True, window=20)
    wanted = hop(q, k, v, mask=mask)[0]
    assert torch.allclose(window_hop(q, k, v, mask, 8**-0.5)[0], wanted)
    one = torch.vmap(lambda q, k, v: window_hop(q[None], k[None], v[None], mask, 8**-0.5)[0][0])
    assert torch.allclose(one(q, k, v), wanted)


def test_chunks_are_for_windows_narrow_beside_the_length():
    q = torch.randn(1, 1, 500, 8)
    assert chunk_size(q, q, Mask(window=40)) == 64
    assert chunk_size(q, q, Mask(window=260)) is None
    assert chunk_size(q, q, Mask(window=40, offset=500)) is None
    assert chunk_size(q, q, replace(Mask(window=40), bias=torch.zeros(1, 1, 1, 500))) is None
    assert chunk_size(q, q, Mask()) is None


def test_no_matrix_over_all_tokens_is_made():
    """All pairs of so many tokens would take 40 GB."""
    q = torch.randn(1, 1, 100_000, 4)
    out, _ = window_hop(q, q, q, Mask(causal=True, window=8), 0.5)
    last = hop(q[:, :, -1:], q[:, :, -8:], q[:, :, -8:], scale=0.5)[0]
    assert torch.allclose(out[:, :, -1:], last, atol=1e-5)


def test_second_derivatives_equal_those_of_the_plain_formula():
    mask, roots, found = (
        Mask(causal=True, window=20, sinks=2),
        [torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3)],
        [],
    )
    for dtype in (torch.float32, torch.float64):
        with plain() if dtype == torch.float64 else nullcontext():
            out, _ = window_hop(*(1.5 * t.to(dtype) for t in roots), mask, 0.3)
        slopes = torch.autograd.grad(out.square().sum(), roots, create_graph=True)
        found.append(torch.autograd.grad(sum(s.square().sum() for s in slopes), roots))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
