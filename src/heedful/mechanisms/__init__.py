"""The mechanisms: one way of attending per file, this list of them, and how a name with settings becomes one."""

from __future__ import annotations

from typing import Any

from ..attention import Mechanism, Unsupported
from .clustered import Clustered
from .fitted import FittedPerformer
from .hard import Hard
from .heads import Heads
from .landmarks import Landmarks
from .linear import Linear
from .linformer import Linformer
from .local import Local
from .nystrom import Nystrom
from .performer import Performer
from .reformer import Reformer
from .softmax import Softmax
from .sparse import Sparse
from .topk import TopK

ALL: tuple[type[Mechanism], ...] = (
    Softmax,
    Hard,
    Performer,
    Sparse,
    TopK,
    Heads,
    FittedPerformer,
    Linear,
    Reformer,
    Nystrom,
    Linformer,
    Local,
    Landmarks,
    Clustered,
)

__all__ = [
    "ALL",
    "Clustered",
    "FittedPerformer",
    "Hard",
    "Heads",
    "Landmarks",
    "Linear",
    "Linformer",
    "Local",
    "Mechanism",
    "Nystrom",
    "Performer",
    "Reformer",
    "Softmax",
    "Sparse",
    "TopK",
    "Unsupported",
    "from_settings",
]


def from_settings(name: str, settings: dict[str, Any] | None = None) -> Mechanism:
    """The mechanism of that name with these settings.

    >>> from_settings("Softmax", {"beta": 2.0})
    Softmax(beta=2.0)
    """
    known = {m.__name__: m for m in ALL}
    if name not in known:
        raise ValueError(f"there is no mechanism {name!r}; known are {', '.join(known)}.")
    return known[name](**(settings or {}))
