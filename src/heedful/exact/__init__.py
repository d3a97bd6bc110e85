"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .attribution import Attribution, attribute
from .block import Block, Heads, Mlp, Norm
from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .frozen import Network, attention_network, freeze
from .paths import PathStreams, path_streams
from .truncation import Factors, Pairs, frequency_pairs, logit_factors, mixing_again, value_factors

__all__ = [
    "Attribution",
    "Block",
    "Construction",
    "Factors",
    "Heads",
    "Mlp",
    "Network",
    "Norm",
    "Pairs",
    "PathStreams",
    "attention_network",
    "attribute",
    "convolution_heads",
    "freeze",
    "frequency_pairs",
    "identity_heads",
    "logit_factors",
    "mixing_again",
    "path_streams",
    "permutation_heads",
    "value_factors",
]
