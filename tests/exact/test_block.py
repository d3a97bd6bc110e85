"""Blocks as plain matrices: their norms and gates are torch's own."""

import pytest
import torch
import torch.nn.functional as F
from exact.tiny import random_block

from heedful.exact import Mlp, Norm
from heedful.exact.block import SLOPES

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
}


@pytest.mark.parametrize("name", SLOPES)
def test_an_activation_is_its_argument_times_a_slope(name):
    z = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(z * SLOPES[name](z), ACTIVATIONS[name](z), rtol=1e-13, atol=1e-15)


def test_norms_are_torchs():
    x, weight, bias = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(8).double(), torch.randn(8).double()
    torch.testing.assert_close(Norm(weight, bias, 1e-5, True)(x), F.layer_norm(x, (8,), weight, bias, 1e-5))
    torch.testing.assert_close(Norm(weight, torch.zeros_like(bias), 1e-5, False)(x), F.rms_norm(x, (8,), weight, 1e-5))


def test_a_gated_mlp_is_activation_of_the_gate_times_the_rest():
    mlp = random_block(2, 4, 0, gated=True, activation="silu").mlp
    x = torch.randn(3, 4, dtype=torch.float64)
    exact = (F.silu(x @ mlp.gate + mlp.b_gate) * (x @ mlp.up + mlp.b_up)) @ mlp.down + mlp.b_down
    torch.testing.assert_close(mlp(x), exact)


def test_an_unknown_activation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'tanh' is none of relu"):
        Mlp(torch.eye(2), torch.eye(2), torch.zeros(2), torch.zeros(2), "tanh")
