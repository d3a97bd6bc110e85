"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .bound import BoundReport, collapse_bound
from .centre import Centre, l1_centre
from .collapse import Around, SelfAttention, residual_recursion
from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .contraction import centred_norm, dobrushin, frozen_contraction, one_head
from .dense import attention_matrix
from .limits import hard_bound, soft_bound
from .lowrank import jl_error, projected, rank_errors, rank_needed
from .residual import composite_norm, residual
from .spectral import effective_rank, singular_values, streamed_rank_errors

__all__ = [
    "Around",
    "BoundReport",
    "Centre",
    "Construction",
    "SelfAttention",
    "attention_matrix",
    "centred_norm",
    "collapse_bound",
    "composite_norm",
    "convolution_heads",
    "dobrushin",
    "effective_rank",
    "frozen_contraction",
    "hard_bound",
    "identity_heads",
    "jl_error",
    "l1_centre",
    "one_head",
    "permutation_heads",
    "projected",
    "rank_errors",
    "rank_needed",
    "residual",
    "residual_recursion",
    "singular_values",
    "soft_bound",
    "streamed_rank_errors",
]
