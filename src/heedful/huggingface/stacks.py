"""Stacks: the blocks that a model repeats, read off the names of its attention layers."""

from __future__ import annotations

import re
from collections.abc import Iterable


def stack_of(name: str) -> str:
    """The stack of blocks that a module is in: `encoder.layer` of `encoder.layer.3.attention.self`."""
    found = re.match(r"(.*?)\.?\d+(\.|$)", name)
    return found.group(1) if found else ""


def stacks(layers: Iterable[str]) -> dict[str, list[str]]:
    """The blocks of each stack, from the names of their attention layers.

    >>> stacks(["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"])
    {'encoder.layer': ['encoder.layer.0', 'encoder.layer.1']}
    """
    found: dict[str, dict[str, None]] = {}
    for name in layers:
        stack = stack_of(name)
        number = re.match(r"\.?(\d+)", name[len(stack) :])
        if number is not None:
            found.setdefault(stack, {})[f"{stack}.{number.group(1)}".lstrip(".")] = None
    return {stack: list(names) for stack, names in found.items()}
