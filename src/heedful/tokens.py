"""Tokens: texts become token ids that fit the model, long ones in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .checkpoint import Checkpoint

SLICE = 2**16  # characters of a long text that are tokenised at once


def _needs_tokenizer(checkpoint: Checkpoint) -> Any:
    if checkpoint.tokenizer is None:
        kind = type(checkpoint.processor).__name__ if checkpoint.processor is not None else "no processor"
        raise ValueError(
            f"{checkpoint.name} comes with {kind}, so it cannot read text; give "
            + ("images or sounds" if checkpoint.processor is not None else "hd.Checkpoint(model, tokenizer), or token ids")
            + "."
        )
    return checkpoint.tokenizer


def tokenized(checkpoint: Checkpoint, texts: list[str], length: int) -> Iterator[list[int]]:
    tokenizer = _needs_tokenizer(checkpoint)
    _room(checkpoint, length)
    for start in range(0, len(texts), 256):
        for ids in tokenizer(texts[start : start + 256], add_special_tokens=True, verbose=False)["input_ids"]:
            check_ids(checkpoint, ids)
            yield ids


def pieces(checkpoint: Checkpoint, text: str, length: int) -> Iterator[list[int]]:
    """A long text cut into pieces that each have the special tokens of a text of their own, no more of it tokenised than is asked for."""
    tokenizer = _needs_tokenizer(checkpoint)
    (before, after), room = _special(tokenizer), _room(checkpoint, length)
    ids: list[int] = []
    for part in _slices(text):
        new = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        check_ids(checkpoint, new)
        ids += new
        whole = len(ids) - len(ids) % room
        yield from (before + ids[i : i + room] + after for i in range(0, whole, room))
        ids = ids[whole:]
    if ids:
        yield before + ids + after


def _slices(text: str) -> Iterator[str]:
    """A long text in slices that end with a line, or else with a word."""
    start = 0
    while start < len(text):
        stop = end = start + SLICE
        if end < len(text):
            stop = text.rfind("\n", start, end) + 1 or text.rfind(" ", start + 1, end)
        yield text[start : (stop := stop if stop > start else end)]
        start = stop


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    sample = tokenizer("a", add_special_tokens=True)["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    front = next((i for i in range(len(sample)) if sample[i : i + len(bare)] == bare), 0)
    return sample[:front], sample[front + len(bare) :]


def _room(checkpoint: Checkpoint, length: int) -> int:
    """How many tokens of the text itself fit."""
    special = sum(map(len, _special(checkpoint.tokenizer)))
    if special >= length:
        raise ValueError(f"length is {length} but {special} special tokens stand around each text; give at least {special + 1}.")
    return length - special


def check_ids(checkpoint: Checkpoint, ids: list[int]) -> None:
    size = getattr(text_config(checkpoint), "vocab_size", None)
    if ids and size is not None and not 0 <= min(ids) <= max(ids) < size:
        raise ValueError(
            f"token ids reach from {min(ids)} to {max(ids)} but the model knows 0 to {size - 1}; use its own tokenizer."
        )


def text_config(checkpoint: Checkpoint) -> Any:
    return checkpoint.config.get_text_config() if hasattr(checkpoint.config, "get_text_config") else checkpoint.config
