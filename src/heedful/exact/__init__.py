"""Closed forms on plain tensors: attention's derivatives, what an edit changes, what heads can be made to do. Torch alone."""

from .call_derivative import CallDerivative
from .columns import ColumnAttention
from .constructions import Construction, convolution_heads, identity_heads, permutation_heads
from .curvature import query_curvature
from .derivative import Derivative, attention_jvp, attention_vjp
from .edits import delete_token, perturb_key, perturb_query
from .jacobian import attention_jacobian, context_jacobian
from .layer import Layer
from .lipschitz import Stretch, largest_singular, local_lipschitz
from .sensitivity import Removal, key_sensitivity, query_sensitivity, value_sensitivity
from .softmax_jacobian import softmax_jacobian_norm

__all__ = [
    "CallDerivative",
    "ColumnAttention",
    "Construction",
    "Derivative",
    "Layer",
    "Removal",
    "Stretch",
    "attention_jacobian",
    "attention_jvp",
    "attention_vjp",
    "context_jacobian",
    "convolution_heads",
    "delete_token",
    "identity_heads",
    "key_sensitivity",
    "largest_singular",
    "local_lipschitz",
    "permutation_heads",
    "perturb_key",
    "perturb_query",
    "query_curvature",
    "query_sensitivity",
    "softmax_jacobian_norm",
    "value_sensitivity",
]
