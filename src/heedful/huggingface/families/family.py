"""Family: the names of modules and settings that a kind of models shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a matrix is: a linear module of the block, and which of its equal parts along the output."""

    module: str
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Family:
    """Where a block keeps its matrices; names of modules are within the block, `blocks` and `final` within the base model."""

    blocks: str
    attention: str  # the module that attends
    q: Place
    k: Place
    v: Place
    o: Place
    up: Place
    down: Place
    norms: tuple[str, str]  # of attention and of the MLP
    pre: bool  # norms before attention and MLP, rather than after their sums
    activation: str  # the setting that names it
    gate: Place | None = None
    final: str | None = None  # the norm after the last block
    rotary: bool = False
