"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .attribution import Attribution, attribute
from .block import Block, Heads, Mlp, Norm
from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .counting import attention_parameters
from .deciding import Search, growth_score, line_search
from .frozen import Network, attention_network, freeze
from .growing import DAMPINGS, NewDims, NewHead, add_head, grow_dk, grow_dv
from .lowrank import LowRank, gradmax, lowrank_regression, lowrank_solution, plain_regression, truncate
from .metric import Metric
from .operators import Fisher, Frobenius, conjugate_gradients
from .paths import PathStreams, path_streams
from .probe import logit_gradient
from .signal import Signal

__all__ = [
    "DAMPINGS",
    "Attribution",
    "Block",
    "Construction",
    "Fisher",
    "Frobenius",
    "Heads",
    "LowRank",
    "Metric",
    "Mlp",
    "Network",
    "NewDims",
    "NewHead",
    "Norm",
    "PathStreams",
    "Search",
    "Signal",
    "add_head",
    "attention_network",
    "attention_parameters",
    "attribute",
    "conjugate_gradients",
    "convolution_heads",
    "freeze",
    "gradmax",
    "grow_dk",
    "grow_dv",
    "growth_score",
    "identity_heads",
    "line_search",
    "logit_gradient",
    "lowrank_regression",
    "lowrank_solution",
    "path_streams",
    "permutation_heads",
    "plain_regression",
    "truncate",
]
