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
from .curvature import query_curvature
from .dense import attention_matrix
from .derivative import Derivative, attention_jvp, attention_vjp
from .edits import delete_token, perturb_key, perturb_query
from .frozen import Network, attention_network, freeze
from .jacobian import attention_jacobian, context_jacobian
from .layer import Layer
from .limits import hard_bound, soft_bound
from .lipschitz import local_lipschitz
from .lowrank import jl_error, projected, rank_errors, rank_needed
from .paths import PathStreams, path_streams
from .residual import composite_norm, residual
from .sensitivity import Removal, key_sensitivity, query_sensitivity, value_sensitivity
from .singular import Stretch, largest_singular
from .softmax_jacobian import softmax_jacobian_norm
from .spectral import effective_rank, singular_values, streamed_rank_errors
from .truncation import Factors, Pairs, frequency_pairs, logit_factors, mixing_again, value_factors

__all__ = [
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
    "Heads",
    "Layer",
    "Mlp",
    "Network",
    "Norm",
    "Pairs",
    "PathStreams",
    "Removal",
    "SelfAttention",
    "Stretch",
    "attention_jacobian",
    "attention_jvp",
    "attention_matrix",
    "attention_network",
    "attention_vjp",
    "attribute",
    "centred_norm",
    "collapse_bound",
    "composite_norm",
    "context_jacobian",
    "convolution_heads",
    "delete_token",
    "dobrushin",
    "effective_rank",
    "freeze",
    "frequency_pairs",
    "frozen_contraction",
    "hard_bound",
    "identity_heads",
    "jl_error",
    "key_sensitivity",
    "l1_centre",
    "largest_singular",
    "local_lipschitz",
    "logit_factors",
    "mixing_again",
    "one_head",
    "path_streams",
    "permutation_heads",
    "perturb_key",
    "perturb_query",
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
    "value_factors",
    "value_sensitivity",
]
