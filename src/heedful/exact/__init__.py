"""Closed forms on plain tensors: what attention can be made to do, exactly or with a bound. Torch alone."""

from .constructions import Construction, convolution_heads, identity_heads, permutation_heads

__all__ = ["Construction", "convolution_heads", "identity_heads", "permutation_heads"]
