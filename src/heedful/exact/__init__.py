"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .attribution import Attribution, attribute
from .block import Block, Heads, Mlp, Norm
from .bound import BoundReport, collapse_bound
from .call_derivative import CallDerivative
from .centre import Centre, l1_centre
from .collapse import Around, SelfAttention, residual_recursion
from .columns import ColumnAttention
from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .contraction import centred_norm, dobrushin, frozen_contraction, one_head
from .counting import attention_parameters
from .curvature import query_curvature
from .deciding import Search, growth_score, line_search
from .dense import attention_matrix
from .derivative import Derivative, attention_jvp, attention_vjp
from .edits import delete_token, perturb_key, perturb_query
from .frozen import Network, attention_network, freeze
from .growing import DAMPINGS, NewDims, NewHead, add_head, grow_dk, grow_dv
from .jacobian import attention_jacobian, context_jacobian
from .layer import Layer
from .limits import hard_bound, soft_bound
from .lipschitz import Stretch, largest_singular, local_lipschitz
from .lowrank import jl_error, projected, rank_errors, rank_needed
from .metric import Metric
from .operators import Fisher, Frobenius, conjugate_gradients
from .paths import PathStreams, path_streams
from .probe import logit_gradient
from .regression import LowRank, gradmax, lowrank_regression, lowrank_solution, plain_regression, truncate
from .residual import composite_norm, residual
from .sensitivity import Removal, key_sensitivity, query_sensitivity, value_sensitivity
from .signal import Signal
from .softmax_jacobian import softmax_jacobian_norm
from .spectral import effective_rank, singular_values, streamed_rank_errors
from .truncation import Factors, Pairs, frequency_pairs, logit_factors, mixing_again, value_factors

__all__ = [
    "DAMPINGS",
    "Around",
    "Attribution",
    "Block",
    "BoundReport",
    "CallDerivative",
    "Centre",
    "ColumnAttention",
    "Construction",
    "Derivative",
    "Factors",
    "Fisher",
    "Frobenius",
    "Heads",
    "Layer",
    "LowRank",
    "Metric",
    "Mlp",
    "Network",
    "NewDims",
    "NewHead",
    "Norm",
    "Pairs",
    "PathStreams",
    "Removal",
    "Search",
    "SelfAttention",
    "Signal",
    "Stretch",
    "add_head",
    "attention_jacobian",
    "attention_jvp",
    "attention_matrix",
    "attention_network",
    "attention_parameters",
    "attention_vjp",
    "attribute",
    "centred_norm",
    "collapse_bound",
    "composite_norm",
    "conjugate_gradients",
    "context_jacobian",
    "convolution_heads",
    "delete_token",
    "dobrushin",
    "effective_rank",
    "freeze",
    "frequency_pairs",
    "frozen_contraction",
    "gradmax",
    "grow_dk",
    "grow_dv",
    "growth_score",
    "hard_bound",
    "identity_heads",
    "jl_error",
    "key_sensitivity",
    "l1_centre",
    "largest_singular",
    "line_search",
    "local_lipschitz",
    "logit_factors",
    "logit_gradient",
    "lowrank_regression",
    "lowrank_solution",
    "mixing_again",
    "one_head",
    "path_streams",
    "permutation_heads",
    "perturb_key",
    "perturb_query",
    "plain_regression",
    "projected",
    "query_curvature",
    "query_sensitivity",
    "rank_errors",
    "rank_needed",
    "residual",
    "residual_recursion",
    "singular_values",
    "soft_bound",
    "softmax_jacobian_norm",
    "streamed_rank_errors",
    "truncate",
    "value_factors",
    "value_sensitivity",
]
