"""Rank collapse: the recursion is the network itself, to the last digit and far below rounding."""

import math
from itertools import pairwise

import mpmath
import pytest
import torch

from heedful.exact import Layer, SelfAttention, residual, residual_recursion
from heedful.exact.collapse import _around, _difference, shifts


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(heads=3, dim=6, seed=0, size=1.0):
    """Random weights with biases everywhere."""
    weights = size * drawn(4, dim, dim, seed=seed) / dim**0.5
    return SelfAttention.of(*weights, heads=heads, biases=list(drawn(4, dim, seed=seed + 100)))


def network(x, layers):
    states = [x]
    for one in layers:
        states.append(one(states[-1]))
    return states


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("center", ["mean", "image"])
def test_the_recursion_is_the_forward_pass(center, size):
    x, layers = drawn(8, 6), [layer(seed=s, size=size) for s in range(4)]
    for around, state in zip(residual_recursion(x, layers, center), network(x, layers), strict=True):
        rounding = 1e-12 * float(state.abs().amax())
        torch.testing.assert_close(around.centre + around.rest, state, rtol=0, atol=rounding)
        if center == "mean":
            torch.testing.assert_close(around.rest, residual(state), rtol=0, atol=rounding)


def test_a_layer_is_multi_head_attention():
    x, made = drawn(5, 6), layer()
    weights, (b_q, b_k, b_v, b_o) = drawn(4, 6, 6) / 6**0.5, drawn(4, 6, seed=100)
    q, k, v = ((x @ w + b).unflatten(-1, (3, 2)).transpose(0, 1) for w, b in zip(weights, (b_q, b_k, b_v), strict=False))
    heads = ((q @ k.mT) / 2**0.5).softmax(-1) @ v
    torch.testing.assert_close(made(x), heads.transpose(0, 1).flatten(1) @ weights[3] + b_o)


def test_a_key_bias_never_matters():
    weights, biases = list(drawn(4, 6, 6)), list(drawn(4, 6, seed=1))
    for biased in (biases, [biases[0], None, *biases[2:]]):
        torch.testing.assert_close(
            SelfAttention.of(*weights, heads=2, biases=biased)(drawn(5, 6)),
            SelfAttention.of(*weights, heads=2, biases=biases)(drawn(5, 6)),
        )


def test_softmax_splits_into_what_queries_share_and_what_is_their_own():
    x, made = drawn(7, 6), layer()
    for centre in (x.mean(0), drawn(6, seed=5)):  # any centre will do
        r, e = shifts(_around(centre, x - centre, 0.0), made)
        e = e * (x - centre).square().sum()
        torch.testing.assert_close((r[:, None] + e).softmax(-1), made.attention(x), rtol=1e-13, atol=5e-16)


@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.5, 30.0])
def test_the_difference_of_two_softmaxes_is_exact_to_the_last_digits(size):
    e, r = size * drawn(2, 5, 5), drawn(2, 5, seed=1)
    found, log = _difference(e / size**2, r, math.log(size))
    u = r.exp()
    with mpmath.workdps(60):
        for head in range(2):
            for i in range(5):
                up = [mpmath.mpf(u[head, j].item()) * mpmath.exp(e[head, i, j].item()) for j in range(5)]
                for j in range(5):
                    wanted = up[j] / sum(up) - mpmath.mpf(u[head, j].item()) / sum(mpmath.mpf(v.item()) for v in u[head])
                    assert abs(found[head, i, j].item() * math.exp(log) - wanted) < 1e-13 * min(1, size)


def test_below_rounding_it_is_what_many_digits_say():
    x, layers = drawn(4, 3) / 2, [layer(1, 3, seed=s, size=0.8) for s in range(5)]
    found = residual_recursion(x, layers)
    with mpmath.workdps(400):
        state = mpmath.matrix(x.tolist())
        for one, around in zip(layers, found[1:], strict=True):
            state = by_digits(state, one)
            mean = [sum(state[i, j] for i in range(4)) / 4 for j in range(3)]
            size = mpmath.sqrt(sum((state[i, j] - mean[j]) ** 2 for i in range(4) for j in range(3)))
            assert abs(mpmath.log10(size) - around.log10) < 1e-10 * max(1, abs(around.log10))
    assert found[-1].log10 < -100


@pytest.mark.parametrize("far", [10.0, 60.0])
def test_where_all_queries_look_at_one_key_what_the_others_hold_is_not_lost_beside_it(far):
    x, one = drawn(4, 3) / 2 + far, layer(1, 3, size=0.8)
    with mpmath.workdps(60):
        state = by_digits(mpmath.matrix(x.tolist()), one)
        mean = [sum(state[i, j] for i in range(4)) / 4 for j in range(3)]
        size = mpmath.sqrt(sum((state[i, j] - mean[j]) ** 2 for i in range(4) for j in range(3)))
        assert abs(mpmath.log10(size) - residual_recursion(x, [one])[1].log10) < 1e-11


def by_digits(x, one):
    query, key, value = (mpmath.matrix(t[0].tolist()) for t in (one.query, one.key, one.map))
    bias = mpmath.matrix([one.query_bias[0].tolist()] * 4)
    scores = (x * query + bias) * (x * key).T * one.scale
    for i in range(4):
        row = [mpmath.exp(scores[i, j]) for j in range(4)]
        for j in range(4):
            scores[i, j] = row[j] / sum(row)
    return scores * x * value + mpmath.matrix([one.bias.tolist()] * 4)


def test_deep_networks_obey_the_cubic_law_past_the_floats():
    found = residual_recursion(drawn(6, 6), [layer(2, seed=s, size=0.5) for s in range(12)])
    logs = [around.log10 for around in found]
    assert logs[-1] < -1e4
    assert all(abs(b / a - 3) < 0.05 for a, b in pairwise(logs[7:]))
    assert all(torch.isclose(around.unit.norm(), torch.tensor(1.0, dtype=torch.float64)) for around in found)


def test_equal_rows_stay_equal():
    found = residual_recursion(torch.ones(3, 6, dtype=torch.float64), [layer()] * 2)
    assert [around.log10 for around in found] == [-math.inf] * 3
    torch.testing.assert_close(found[-1].centre, network(torch.ones(3, 6, dtype=torch.float64), [layer()] * 2)[-1][0])
    assert not found[-1].rest.any()


def test_what_is_no_such_network_is_refused():
    x = drawn(4, 6)
    with pytest.raises(ValueError, match="no center 'median'; give mean or image"):
        residual_recursion(x, [layer()], "median")
    with pytest.raises(ValueError, match="layer 1 is for 4 dims and x has 6"):
        residual_recursion(x, [layer(), layer(2, 4)])
    with pytest.raises(ValueError, match="one text"):
        residual_recursion(x[None], [layer()])
    with pytest.raises(ValueError, match="nan or infinite"):
        residual_recursion(x / 0, [layer()])
    with pytest.raises(TypeError, match="best float64"):
        residual_recursion(x.float(), [layer()])
    with pytest.raises(ValueError, match=r"for 2 heads; got w_q \(6, 6\), w_k \(6, 4\)"):
        SelfAttention.of(torch.ones(6, 6), torch.ones(6, 4), torch.ones(6, 6), torch.ones(6, 6), heads=2)
    with pytest.raises(ValueError, match="4 heads do not divide"):
        SelfAttention.of(*[torch.ones(6, 6)] * 4, heads=4)
    with pytest.raises(ValueError, match="a mask or a context"):
        SelfAttention.of(*[torch.ones(6, 6)] * 4, mask=torch.ones(4, 4).bool())
    with pytest.raises(ValueError, match="makes 5 dims of 6"):
        SelfAttention.of(*[torch.ones(6, 6)] * 3, torch.ones(6, 5))


def test_shared_key_heads_are_those_of_every_query_head_that_reads_them():
    w_q, w_k, w_v, w_o = drawn(6, 8), drawn(6, 4, seed=1), drawn(6, 4, seed=2), drawn(8, 6, seed=3)
    biases = [drawn(8, seed=4), drawn(4, seed=5), drawn(4, seed=6), None]
    whole, x = Layer(w_q, w_k, w_v, w_o, heads=4, biases=biases), drawn(5, 6, seed=7)
    torch.testing.assert_close(SelfAttention.of(whole)(x), whole(x))
