"""Spec: mechanisms, lengths and sizes from the words of a command line."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Sequence

from .attention import Mechanism
from .mechanisms import ALL

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def mechanisms(text: str, more: Sequence[type[Mechanism]] = ()) -> list[Mechanism]:
    """Mechanisms from their names with settings; `more` kinds may be named beside those of heedful.mechanisms.

    >>> mechanisms("Softmax, Performer(features=128)")
    [Softmax(beta=1.0), Performer(features=128, directions='orthogonal', seed=0)]
    """
    try:
        tree = ast.parse(f"[{text}\n]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.List):
        raise ValueError(f"{text!r} cannot be read; write mechanisms like Performer(features=128),Softmax.")
    kinds = {kind.__name__: kind for kind in (*ALL, *more)}
    return [_mechanism(node, kinds) for node in tree.elts]


def _mechanism(node: ast.expr, kinds: dict[str, type[Mechanism]]) -> Mechanism:
    named = node.func if isinstance(node, ast.Call) else node
    if not isinstance(named, ast.Name) or (isinstance(node, ast.Call) and node.args):
        raise ValueError(f"{ast.unparse(node)!r} is no mechanism; name it and its settings, like Performer(features=128).")
    if named.id not in kinds:
        raise ValueError(f"there is no mechanism {named.id!r}; known are {', '.join(kinds)}.")
    kind = kinds[named.id]
    settings = {str(word.arg): _value(word) for word in node.keywords} if isinstance(node, ast.Call) else {}
    fields = [f for f in dataclasses.fields(kind) if f.init]  # type: ignore[arg-type]
    unknown = sorted(settings.keys() - {f.name for f in fields})
    if unknown:
        raise ValueError(f"{named.id} has no setting {unknown[0]!r}; it has {', '.join(f.name for f in fields) or 'none'}.")
    try:
        return kind(**settings)
    except TypeError as error:
        raise ValueError(f"{ast.unparse(node)} cannot be made: {error}.") from error


def _value(word: ast.keyword) -> object:
    try:
        return ast.literal_eval(word.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(
            f"setting {word.arg!r} is {ast.unparse(word.value)}; it must be plain data: a number, a 'word', or a tuple of such."
        ) from None


def lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens, listed or doubling from the first to the last.

    >>> lengths("512..4096"), lengths("500,2000")
    ((512, 1024, 2048, 4096), (500, 2000))
    """
    found = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if found is not None:
        low, high = int(found[1]), int(found[2])
        if not 0 < low <= high:
            raise ValueError(f"lengths {text!r} go from {low} to {high}; the first must be above 0 and not above the last.")
        steps = (low * 2**i for i in range((high // low).bit_length()))
        return tuple(dict.fromkeys((*(step for step in steps if step <= high), high)))
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"lengths {text!r} cannot be read; write 512..65536 (doubling) or 512,2048,8192.")
    return tuple(int(part) for part in parts)


def size(text: str | int) -> int:
    """Bytes, from a number with a unit.

    >>> size("4GB"), size("1.5 MB"), size(100)
    (4000000000, 1500000, 100)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", str(text), re.IGNORECASE)
    unit = found[2].upper() if found else "?"
    unit = unit if unit in UNITS else unit + "B"
    if found is None or unit not in UNITS:
        raise ValueError(f"{text!r} is no size in memory; write bytes, or 500MB or 4GB.")
    return round(float(found[1]) * UNITS[unit])
