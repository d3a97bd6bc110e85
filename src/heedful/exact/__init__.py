"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .attribution import Attribution, attribute
from .block import Block, Heads, Mlp, Norm
from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .frozen import Network, attention_network, freeze
from .paths import PathStreams, path_streams

__all__ = [
    "Attribution",
    "Block",
    "Construction",
    "Heads",
    "Mlp",
    "Network",
    "Norm",
    "PathStreams",
    "attention_network",
    "attribute",
    "convolution_heads",
    "freeze",
    "identity_heads",
    "path_streams",
    "permutation_heads",
]
