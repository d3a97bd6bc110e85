"""Given: one text as a model reads it, cut to length, with a word for each token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..inputs import Sample, allowed_length, collate, read
from ..scan import prepare
from ..texts import READERS, Long, Tokens, items

DEFAULT = 128  # tokens, unless more are asked for


@dataclass(frozen=True, eq=False)
class Given:
    """A model and one text for it."""

    checkpoint: Checkpoint
    ids: list[int]
    notes: list[str]  # what was done to the text

    @property
    def sample(self) -> Sample:
        return Sample(Tokens(self.ids), len(self.ids))

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model is called with."""
        return prepare(self.checkpoint.model, collate(self.checkpoint, [self.sample]))

    @property
    def words(self) -> list[str]:
        """The text of each token; a blank one in quotes."""
        tokenizer = self.checkpoint.tokenizer
        if tokenizer is None:
            return [str(i) for i in self.ids]
        decoded = [tokenizer.decode([i]) for i in self.ids]
        return [word.strip() or repr(word) for word in decoded]


def given(checkpoint: Checkpoint, text: Any, length: int | None = None) -> Given:
    """A text (itself, token ids, or a path to a file whose first text is taken), cut to `length` tokens where it is longer."""
    value = one(text)
    count = allowed_length(checkpoint, length) if length is not None else min(DEFAULT, allowed_length(checkpoint, None))
    reading = read(checkpoint, [value], 1, count)
    item = reading.batches[0][0].item
    if not isinstance(item, Tokens):
        raise ValueError(
            f"an explanation is of a text, but {type(item).__name__} was given; give a text, token ids or a .txt file."
        )
    if len(item.ids) < 2:
        raise ValueError("the text is one token, which can only attend to itself; give a longer one.")
    notes = [f"the text is longer than {count} tokens and was cut there; --length reads more."] if reading.truncated else []
    return Given(checkpoint, item.ids, notes)


def one(text: Any) -> Any:
    """The one text that was given, whole."""
    if isinstance(text, str) and not text.strip():
        raise ValueError("the text is empty; give a text, or a path to one.")
    is_file = isinstance(text, Path) or (isinstance(text, str) and len(text) < 1024 and _exists(text))
    if isinstance(text, str) and not is_file and Path(text).suffix in READERS and not any(map(str.isspace, text)):
        raise ValueError(f"{text} is named like a file but is not there; give the path of one that is, or a text.")
    found = items(Path(text) if is_file else [text], 1)[0]
    return found.text if isinstance(found, Long) else found


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # no path at all
        return False
