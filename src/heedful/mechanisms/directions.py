"""Directions: the random vectors that Performer's features look along, each distributed as a standard normal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def sample(kind: str, features: int, dim: int, seed: int) -> Float[Tensor, "features dim"]:
    """That many directions of that kind: the same for the same seed, on whatever device they are used.

    >>> sample("orthogonal", 4, 16, seed=0).shape
    torch.Size([4, 16])
    >>> w = sample("orthogonal", 16, 16, seed=0)
    >>> norms = w.norm(dim=1)
    >>> torch.allclose(w @ w.mT, torch.diag(norms**2), atol=1e-4)
    True
    """
    source = Generator("cpu").manual_seed(seed)
    return KINDS[kind](features, dim, source).float()


def iid(features: int, dim: int, source: Generator) -> Tensor:
    """Independent standard normal vectors."""
    return torch.randn(features, dim, generator=source, dtype=torch.float64, device="cpu")


def orthogonal(features: int, dim: int, source: Generator) -> Tensor:
    """Rows at right angles within each block of `dim`, their lengths those of normal vectors.

    Yu et al. 2016, Orthogonal Random Features.
    """
    rows = torch.cat([_rotation(dim, source) for _ in range(-(-features // dim))])[:features]
    return rows * _lengths(features, dim, source)


def simplex(features: int, dim: int, source: Generator) -> Tensor:
    """Rows as far apart as they can be within each block of `dim`: the corners of a turned simplex.

    Reid et al. 2023, Simplex Random Features.
    """
    if dim < 2:
        raise ValueError(f"simplex directions need a head dim of at least 2, got {dim}; use directions='orthogonal'.")
    corners = (torch.eye(dim, dtype=torch.float64, device="cpu") - 1 / dim) * (dim / (dim - 1)) ** 0.5  # unit rows
    rows = torch.cat([corners @ _rotation(dim, source) for _ in range(-(-features // dim))])[:features]
    return rows * _lengths(features, dim, source)


def antithetic(features: int, dim: int, source: Generator) -> Tensor:
    """Orthogonal rows, each followed by its opposite."""
    half = orthogonal(-(-features // 2), dim, source)
    return torch.stack([half, -half], 1).flatten(0, 1)[:features]


KINDS = {"orthogonal": orthogonal, "iid": iid, "simplex": simplex, "antithetic": antithetic}


def _rotation(dim: int, source: Generator) -> Tensor:
    """A uniformly random rotation or reflection: QR with the signs of R taken back."""
    q, r = torch.linalg.qr(iid(dim, dim, source))
    return (q * r.diagonal().sign()).mT


def _lengths(features: int, dim: int, source: Generator) -> Tensor:
    return iid(features, dim, source).norm(dim=1, keepdim=True)
