"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .dense import attention_matrix
from .limits import hard_bound, soft_bound
from .lowrank import jl_error, projected, rank_errors, rank_needed
from .spectral import effective_rank, singular_values, streamed_rank_errors

__all__ = [
    "Construction",
    "attention_matrix",
    "convolution_heads",
    "effective_rank",
    "hard_bound",
    "identity_heads",
    "jl_error",
    "permutation_heads",
    "projected",
    "rank_errors",
    "rank_needed",
    "singular_values",
    "soft_bound",
    "streamed_rank_errors",
]
