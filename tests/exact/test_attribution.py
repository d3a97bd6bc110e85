"""Attribution by length is that of the streams, and by head what leaving the head out of all paths takes away."""

from dataclasses import replace

import pytest
import torch
from exact.tiny import network_of, random_block

from heedful.attention import Mask
from heedful.exact import Norm, attention_network, attribute, path_streams
from heedful.exact.frozen import random_heads

DIM, HEADS = 6, 2
FINAL = Norm(torch.linspace(0.5, 1, DIM).double(), torch.ones(DIM).double(), 1e-5, True)


def networks():
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    heads = [random_heads(HEADS, DIM, seed) for seed in range(5)]
    yield "SAN", attention_network(x, heads, skip=False)
    yield "SAN with skip", attention_network(x, heads, mask=Mask(causal=True))
    for pre in (True, False):
        for layers in (1, 2, 5):
            blocks = [random_block(HEADS, DIM, seed, pre) for seed in range(layers)]
            yield f"{layers} layers, pre {pre}", network_of(blocks, x, final=FINAL if pre else None)


@pytest.fixture(params=range(8))
def network(request):
    torch.manual_seed(0)
    return list(networks())[request.param][1]


def test_lengths_and_bias_are_those_of_the_streams(network):
    found, streams = attribute(network), path_streams(network)
    exact = torch.cat([streams.shares()[:, : len(streams.tokens)], streams.shares()[:, -1:]], -1)
    torch.testing.assert_close(torch.cat([found.lengths, found.bias[:, None]], -1), exact, rtol=1e-11, atol=1e-14)


def test_a_head_is_worth_what_leaving_it_out_takes(network):
    direction = torch.randn_like(network.output)
    found = attribute(network, direction).heads
    for number, layer in enumerate(network.layers):
        for head in range(HEADS):
            w_o = layer.heads.w_o.clone()
            w_o[head] = 0
            without = list(network.layers)
            without[number] = replace(layer, heads=replace(layer.heads, w_o=w_o))
            left = path_streams(replace(network, layers=tuple(without))).total
            taken = (direction * (network.output - left)).sum((-2, -1))
            torch.testing.assert_close(found[number, :, head], taken, rtol=1e-10, atol=1e-12)


def test_with_the_output_as_direction_effects_are_shares_of_it(network):
    found = attribute(network)
    torch.testing.assert_close(found.lengths.sum(-1) + found.bias, torch.ones(2, dtype=torch.float64))


def test_another_shape_of_direction_is_refused(network):
    with pytest.raises(ValueError, match=r"the direction is \(1, 6\) but the output \(2, 5, 6\)"):
        attribute(network, torch.ones(1, 6))


def test_an_output_of_zero_has_no_shares(network):
    with pytest.raises(ValueError, match="the output of a text is zero, so nothing has a share of it"):
        attribute(replace(network, output=0 * network.output))


def test_states_of_another_shape_or_too_coarse_are_refused_before_work():
    with pytest.raises(ValueError, match=r"states \(batch, tokens, dim\)"):
        attention_network(torch.ones(5, DIM), [random_heads(HEADS, DIM)])
    with pytest.raises(ValueError, match="float16, too coarse"):
        attention_network(torch.ones(1, 5, DIM).half(), [random_heads(HEADS, DIM)])
