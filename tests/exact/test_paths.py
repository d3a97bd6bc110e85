"""Path streams are the sum of all paths, each worked out alone, and together what the network computes."""

from dataclasses import replace

import pytest
import torch
from exact.tiny import matrices_of, network_of, paths_of, random_block

from heedful.attention import Mask
from heedful.exact import Network, Norm, attention_network, path_streams
from heedful.exact.frozen import random_heads
from heedful.measuring import peak_memory

DEEP, HEADS, DIM, TOKENS = 3, 2, 6, 5


def states(batch=1, tokens=TOKENS):
    return torch.randn(batch, tokens, DIM, dtype=torch.float64)


def heads(layers=DEEP, gain=1.0):
    return [random_heads(HEADS, DIM, seed, gain) for seed in range(layers)]


def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


def summed(network, skip, entry=0):
    """All paths by length, one by one."""
    found = torch.zeros(DEEP + 1, *network.x.shape[1:], dtype=torch.float64)
    for length, p, w in paths_of(matrices_of(network, entry), skip):
        found[length] += p @ network.x[entry] @ w
    return found


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, window=2)], ids=["both ways", "causal", "window"])
@pytest.mark.parametrize("skip", [True, False])
def test_streams_are_all_paths_by_length(skip, mask):
    network = attention_network(states(batch=2), heads(), skip, mask)
    streams = path_streams(network)
    for entry in range(2):
        exact = summed(network, skip, entry)
        assert error(streams.tokens[:, entry], exact) <= 1e-14
        if not skip:
            assert exact[:-1].abs().max() == streams.tokens[:-1].abs().max() == 0
    assert error(streams.total, network.output) <= 1e-14


@pytest.mark.parametrize("skip", [True, False])
def test_biases_make_one_row_whatever_is_read(skip):
    """b^T = sum_l b_l^T prod_(m>l) (c I + sum_h W_h^m), c = 1 with skip: errata 3."""
    network = attention_network(states(), heads(), skip)
    bias, c = torch.zeros(DIM, dtype=torch.float64), float(skip)
    for layer in network.layers:
        own = (layer.heads.b_v[:, None] @ layer.heads.w_o).sum((0, 1)) + layer.heads.b_o
        bias = bias @ (c * torch.eye(DIM, dtype=torch.float64) + (layer.heads.w_v @ layer.heads.w_o).sum(0)) + own
    streams = path_streams(network)
    assert error(streams.bias[0], bias.expand(TOKENS, -1)) <= 1e-14
    assert torch.allclose(path_streams(attention_network(states(), heads(), skip)).bias, streams.bias, rtol=1e-12)


def test_the_first_layer_leftmost_is_wrong():
    """Source 001 reads as P^1 ... P^L: errata 2."""
    network = attention_network(states(), heads(), skip=False)
    wrong = torch.zeros_like(network.x[0])
    reversed_left = [(p.mT, w) for p, w in matrices_of(network)]  # (P^L ... P^1)^T of transposes is P^1 ... P^L
    for _, p, w in paths_of(reversed_left, skip=False):
        wrong += p.mT @ network.x[0] @ w
    assert error(wrong, path_streams(network).tokens[-1, 0]) > 0.02


def test_the_two_orders_of_the_public_code_are_wrong():
    """attention-rank-collapse, said in our words: (1) it pairs the i-th of all left products, listed with the last layer's head
    outermost, with the i-th right product, listed with the first layer's outermost, so that W takes the heads in reverse;
    (2) the attention of a sampled path is the product with the first layer leftmost. For one layer both are right."""
    for deep, wrong_at_least in ((1, 0.0), (DEEP, 0.05)):
        network = attention_network(states(), heads(deep), skip=False)
        layers = matrices_of(network)
        exact = path_streams(network).tokens[-1, 0]
        paths = torch.cartesian_prod(*[torch.arange(HEADS)] * deep).reshape(-1, deep)
        paired, first_leftmost = torch.zeros_like(exact), torch.zeros_like(exact)
        for path in paths.tolist():
            left, other = torch.eye(TOKENS, dtype=torch.float64), torch.eye(TOKENS, dtype=torch.float64)
            mirrored, right = torch.eye(DIM, dtype=torch.float64), torch.eye(DIM, dtype=torch.float64)
            for number, head in enumerate(path):
                left, other = layers[number][0][head] @ left, other @ layers[number][0][head]
                right, mirrored = right @ layers[number][1][head], mirrored @ layers[number][1][path[deep - 1 - number]]
            paired += left @ network.x[0] @ mirrored
            first_leftmost += other @ network.x[0] @ right
        for wrong in (paired, first_leftmost):
            assert (error(wrong, exact) <= 1e-14) if deep == 1 else (error(wrong, exact) > wrong_at_least)


@pytest.mark.parametrize("final", [None, Norm(torch.ones(DIM).double(), torch.ones(DIM).double(), 1e-5, True)], ids=["", "final"])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "gated"])
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("mlp", ["gate", "source"])
def test_full_transformers_are_the_sum_of_their_streams(mlp, pre, gated, final):
    blocks = [random_block(HEADS, DIM, seed, pre, "silu" if gated else "gelu", gated) for seed in range(DEEP)]
    network = network_of(blocks, states(batch=2), Mask(causal=gated), final)
    streams = path_streams(network, mlp)
    assert error(streams.total, network.output) <= 1e-14
    assert streams.norms().shape == (2, DEEP + 1)
    assert torch.allclose(streams.shares().sum(-1), torch.ones(2).double())
    assert (streams.made.abs().max() > 0) == (mlp == "source")


def dense(network: Network, mlp: str):
    """Every layer as dense matrices on all numbers of the states: of each head, of the skip, of what follows the sum."""
    size = network.x[0].numel()

    def matrix(linear):
        basis = torch.eye(size, dtype=torch.float64).view(size, 1, *network.x.shape[1:])
        return linear(basis).reshape(size, size).mT

    for layer, (p, w) in zip(network.layers, matrices_of(network), strict=True):
        first, second = layer.norms

        def after(x, layer=layer, first=first, second=second):
            x = x if layer.pre else first(x)
            if mlp == "gate":
                x = x + ((second(x) if layer.pre else x) @ layer.mlp.up * layer.slope) @ layer.mlp.down
            return x if layer.pre else second(x)

        before = matrix(first) if layer.pre else torch.eye(size, dtype=torch.float64)
        one = [torch.kron(p[h], w[h].mT.contiguous()) @ before for h in range(HEADS)]
        yield one, matrix(after)


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("mlp", ["gate", "source"])
def test_streams_of_full_transformers_are_all_their_paths(mlp, pre):
    network = network_of([random_block(HEADS, DIM, seed, pre) for seed in range(DEEP)], states())
    layers = list(dense(network, mlp))
    found = torch.zeros(DEEP + 1, network.x.numel(), dtype=torch.float64)
    for path in torch.cartesian_prod(*[torch.arange(-1, HEADS)] * DEEP).tolist():  # -1 is the skip
        state = network.x.flatten()
        for head, (one, after) in zip(path, layers, strict=True):
            state = after @ (state if head < 0 else one[head] @ state)
        found[sum(head >= 0 for head in path)] += state
    assert error(path_streams(network, mlp).tokens.flatten(1), found) <= 1e-13


@pytest.mark.parametrize("mlp", ["gate", "source"])
@pytest.mark.parametrize("max_length", [0, 1, 2, 3, 9])
def test_longer_paths_stay_together(max_length, mlp):
    network = network_of([random_block(HEADS, DIM, seed) for seed in range(DEEP + 1)], states())
    whole, some = path_streams(network, mlp), path_streams(network, mlp, max_length)
    kept = min(max_length + 1, DEEP + 2)
    assert error(some.tokens[:kept], whole.tokens[:kept]) <= 1e-14
    if max_length <= DEEP:
        assert error(some.tokens[kept], whole.tokens[kept:].sum(0)) <= 1e-14
        assert len(some.tokens) == kept + 1
    assert some.passes == sum(min(n, max_length + 2) for n in range(1, DEEP + 2)) + (DEEP + 1) * (1 + (mlp == "source"))


def test_the_passes_are_half_the_square_of_the_layers():
    network = attention_network(states(), heads(7))
    assert path_streams(network).passes == 7 * 8 // 2 + 7


def test_what_is_frozen_comes_from_the_input():
    """Streams of one text are not those of another: P is that of the pass."""
    a, b = (attention_network(states(), heads()) for _ in range(2))
    assert error(path_streams(replace(a, x=b.x)).total, b.output) > 1e-3


def test_memory_is_linear_in_the_tokens():
    tokens, dim = 6000, 8
    x = torch.randn(1, tokens, dim)
    one = random_heads(1, dim)
    one = type(one)(**{name: value.float() for name, value in vars(one).items()})
    network = attention_network(x, [one], mask=Mask(causal=True))
    peak = peak_memory(lambda: path_streams(network), torch.device("cpu"))
    assert peak is None or peak < tokens * tokens * 4 / 3


def test_padding_is_left_out_of_norms_and_shares():
    x = states(batch=2)
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, 3:] = False
    streams = path_streams(attention_network(x, heads(), mask=Mask(keys=real)))
    alone = path_streams(attention_network(x[1:, :3], heads()))
    torch.testing.assert_close(streams.norms(real)[1:], alone.norms())
    torch.testing.assert_close(streams.shares(real)[1:], alone.shares())


def test_bad_input_is_refused_with_what_to_do():
    network = attention_network(states(), heads())
    for wrong, message in (
        (lambda: path_streams(network, "gates"), "mlp is 'gates'; give 'gate'"),
        (lambda: path_streams(network, max_length=-1), "max_length is -1; give 0 or more"),
        (lambda: replace(network, x=network.x * torch.nan), "NaN or infinite numbers; look at"),
        (lambda: replace(network, output=network.x / 0), "NaN or infinite numbers"),
        (lambda: replace(network, x=network.x.half()), "float16, too coarse.*dtype=torch.float32"),
        (lambda: replace(network, x=network.x[0]), r"states \(batch, tokens, dim\)"),
        (lambda: replace(network, layers=()), "0 layers"),
        (lambda: replace(network, x=network.x[:, :4]), r"layer 0 mixes .* paths need self-attention"),
        (lambda: replace(network, x=network.x[..., :4]), r"layer 0 has W_V \(2, 6, 3\).*need \(2, 4, dv\)"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
