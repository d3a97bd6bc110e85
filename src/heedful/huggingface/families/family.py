"""Family: the names of modules and settings that a kind of models shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a matrix is: a linear module, and which of its equal parts along the output (of each head's output, where `by_head`)."""

    module: str
    part: int = 0
    parts: int = 1
    by_head: bool = False


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


@dataclass(frozen=True)
class Projections:
    """Where attention modules of some classes keep their matrices, and the words they are called with.

    Places are within the module, or beside it after a leading `..`. `other` names the argument with the states whose keys are read,
    where they are those of other tokens, and `other_mask` the mask that comes with it.
    """

    kinds: tuple[str, ...]
    q: Place
    k: Place
    v: Place
    o: Place
    mask: str = "attention_mask"
    cache: str = "past_key_values"
    other: str | None = None
    other_mask: str | None = None
    rotary: bool = False
    window: bool = False  # hands its sliding window on
    biased: bool = False  # adds a position bias that it computes or is given, and gives it back (T5)
    size: str | None = None  # the setting that says how large a head is, where stock transformers heeds it
