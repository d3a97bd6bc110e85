"""Clustered attention read from left to right is the causal call, whatever the pieces, and a new token reads few keys."""

from unittest.mock import patch

import pytest
import torch

from heedful.attention import Mask
from heedful.mechanisms import Clustered
from heedful.ops import clustered_state

SMALL = {"clusters": 8, "exact": 24, "window": 8, "sinks": 2, "group": 4}
ODD = [{}, {"sinks": 0}, {"sinks": 11}, {"group": 1}, {"group": 8, "rounds": 0}, {"exact": 1}, {"window": 16, "clusters": 40}]


def off(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def tensors(tokens, batch=1, width=6, dtype=torch.float32):
    shapes = (batch, 4, tokens, 8), (batch, 2, tokens, 8), (batch, 2, tokens, width)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def written(mechanism, given, sizes, keys=None, state=None):
    """Outputs and states after each piece."""
    parts, states, start = [], [], 0
    for size in sizes:
        new = slice(start, start + size)
        out, state = mechanism.decode(*(t[:, :, new] for t in given), state, None if keys is None else keys[:, new])
        parts.append(out)
        states.append(state)
        start += size
    return torch.cat(parts, 2), states


@pytest.mark.parametrize("settings", ODD, ids=str)
@pytest.mark.parametrize("sizes", [(1,) * 150, (150,), (70, *(1,) * 60, 20)], ids=["one by one", "at once", "both"])
def test_reading_in_any_pieces_is_the_causal_call(settings, sizes):
    mechanism, given = Clustered(**SMALL | settings), tensors(150)
    assert off(written(mechanism, given, sizes)[0], mechanism(*given, Mask(causal=True))) < 1e-5


@pytest.mark.parametrize("sizes", [(1,) * 100, (30, 9, 61), (100,)], ids=str)
def test_texts_of_a_batch_go_on_at_their_own_pace(sizes):
    mechanism, given, keys = (
        Clustered(**SMALL),
        tensors(100, 5),
        torch.rand(5, 100) < torch.tensor([[0.0], [0.1], [0.5], [0.9], [1.0]]),
    )
    out, states = written(mechanism, given, sizes, keys)
    assert off(out, mechanism(*given, Mask(causal=True, keys=keys))) < 1e-5
    assert (states[-1].closed + states[-1].opened).tolist() == keys.sum(1).tolist()


@pytest.mark.parametrize("dtype, near", [(torch.float64, 1e-12), (torch.float16, 1e-3), (torch.bfloat16, 5e-3)])
def test_keys_are_kept_as_given(dtype, near):
    mechanism, given = Clustered(**SMALL), tensors(90, dtype=dtype)
    out, states = written(mechanism, given, (40, *(1,) * 50))
    assert out.dtype == states[-1].k.dtype == states[-1].near_v.dtype == dtype
    assert off(out, mechanism(*given, Mask(causal=True))) < near


def test_a_state_stays_as_it_was_when_two_texts_go_on_from_it():
    mechanism, given = Clustered(**SMALL), tensors(65)
    _, (start,) = written(mechanism, tuple(t[:, :, :65] for t in given), (65,))
    for _ in range(2):
        more = tuple(torch.cat([t, new], 2) for t, new in zip(given, tensors(40), strict=True))
        out, _ = written(mechanism, tuple(t[:, :, 65:] for t in more), (1,) * 40, state=start)
        assert off(out, mechanism(*more, Mask(causal=True))[:, :, 65:]) < 1e-5


def test_padding_changes_no_state_whatever_lies_in_it():
    mechanism, given, keys = Clustered(**SMALL), tensors(40), (torch.arange(40) > 12)[None]
    for t in given:
        t[:, :, :13] = torch.nan
    out, states = written(mechanism, given, (7, 33), keys)
    assert (out[:, :, :13] == 0).all()
    assert torch.isfinite(out).all()
    assert states[0].closed.tolist() == states[0].opened.tolist() == [0]


def test_keys_are_clustered_only_when_a_window_is_complete_and_each_once_a_level():
    mechanism, given, seen = Clustered(**SMALL), tensors(2 + 64), []
    nearest = clustered_state.nearest_means

    def spy(x, *rest, **named):
        seen.append(x.shape[1])
        return nearest(x, *rest, **named)

    with patch.object(clustered_state, "nearest_means", spy):
        written(mechanism, given, (1,) * 66)
    assert seen == [8, 16, 8, 32, 8, 16, 8]  # the eighth window may still go on


def test_memory_is_that_of_the_keys_and_little_more():
    mechanism, given = Clustered(**SMALL), tensors(4096)
    _, (state,) = written(mechanism, given, (4096,))
    assert state.bytes < 1.6 * sum(t.numel() * t.element_size() for t in given[1:])
    assert state.near_k.shape[2] == 2 + 24
