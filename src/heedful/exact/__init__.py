"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .bound import BoundReport, collapse_bound
from .centre import Centre, l1_centre
from .collapse import Around, SelfAttention, residual_recursion
from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .contraction import centred_norm, dobrushin, frozen_contraction, one_head
from .residual import composite_norm, residual

__all__ = [
    "Around",
    "BoundReport",
    "Centre",
    "Construction",
    "SelfAttention",
    "centred_norm",
    "collapse_bound",
    "composite_norm",
    "convolution_heads",
    "dobrushin",
    "frozen_contraction",
    "identity_heads",
    "l1_centre",
    "one_head",
    "permutation_heads",
    "residual",
    "residual_recursion",
]
