"""Explanations: each way to explain one text is one file with `explain(given)`; this is the list."""

from collections.abc import Callable

from . import collapse, lipschitz, paths, tokens
from .explanation import Explanation, Grid, Lines
from .given import Given, given, one

WAYS: dict[str, Callable[[Given], Explanation]] = {
    "tokens": tokens.explain,
    "lipschitz": lipschitz.explain,
    "paths": paths.explain,
    "collapse": collapse.explain,
}

__all__ = ["WAYS", "Explanation", "Given", "Grid", "Lines", "given", "one"]
