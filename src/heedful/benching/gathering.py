"""Gathering: the calls of a model on texts, as many as the budget allows, some to learn from and some to be judged on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import measuring
from ..attention import Capture
from ..capturing import calls
from ..checkpoint import Checkpoint
from ..inputs import Sample, allowed_length, read
from ..texts import Tokens, items
from ..verdicts import short_names
from .budget import Budget, TooSmall, as_bytes, as_seconds
from .calls import size

PROBED = 16  # tokens read first, to see what a whole text takes
TIME, MEMORY = 0.2, 0.5  # of the budget, for the captures

Layers = dict[str, list[Capture]]


@dataclass(frozen=True, eq=False)
class Gathered:
    """The calls by layer, and what could not be used."""

    judged: Layers
    fitted: Layers
    left_out: dict[str, str]

    @property
    def bytes(self) -> int:
        return sum(size(c) for there in (self.judged, self.fitted) for captures in there.values() for c in captures)


def of_captures(captures: Mapping[str, Sequence[Capture]], layers: Iterable[str | int] | None) -> Gathered:
    """From captures that somebody made: every second call of a layer is learned from."""
    wanted = choose(list(captures), layers)
    most = max(map(len, captures.values()))
    return _split([{name: [captures[name][i]] for name in wanted if i < len(captures[name])} for i in range(most)])


def check(captures: Mapping[str, Sequence[Capture]]) -> None:
    """Refuse what are no captures."""
    if not any(captures.values()):
        raise ValueError("there are no captures to bench on; hd.capture(model, texts) makes them.")
    wrong = [name for name, found in captures.items() if not all(isinstance(c, Capture) for c in found)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} holds no Captures; give what hd.capture(model, texts) returns.")


def of_texts(
    checkpoint: Checkpoint, texts: Any, limit: int, layers: Iterable[str | int] | None, longest: int, budget: Budget
) -> Gathered:
    """From a model that reads: one text at a time, of at most `longest` tokens, every second one to learn from."""
    reading = read(checkpoint, items(texts, limit), 1, min(longest, allowed_length(checkpoint, None)), limit)
    samples = [group[0] for group in reading.batches]
    wanted, each = _probe(checkpoint, samples[0], layers)
    found: list[Layers] = []
    before = budget.spent
    for number, sample in enumerate(samples):
        if found and budget.spent + (budget.spent - before) / number > TIME * budget.seconds:
            break
        if each * sum(s.size for s in samples[: number + 1]) > MEMORY * budget.memory:
            break
        found.append(_read(checkpoint, sample, wanted, budget))
    if not found:
        raise TooSmall(
            f"q, k and v of one text of {samples[0].size} tokens take {as_bytes(each * samples[0].size)}, too much for a budget of "
            f"{as_bytes(budget.memory)}; give more memory, or choose fewer layers or shorter lengths."
        )
    return _split(found)


def _probe(checkpoint: Checkpoint, sample: Sample, layers: Iterable[str | int] | None) -> tuple[list[str], float]:
    """The layers that are wanted, and the bytes that their captures take for each token."""
    short = sample
    if isinstance(sample.item, Tokens):
        few = sample.item.ids[:PROBED]
        short = Sample(Tokens(few), len(few))
    seen = calls(checkpoint, [short])
    if not seen:
        raise ValueError(f"no attention call of {checkpoint.name} was seen; `heedful doctor` says why.")
    wanted = choose(list(seen), layers)
    return wanted, sum(size(c) for name in wanted for c in seen[name]) / max(1, short.size)


def _read(checkpoint: Checkpoint, sample: Sample, wanted: list[str], budget: Budget) -> Layers:
    try:
        with measuring.Deadline(budget.left):
            found = calls(checkpoint, [sample], set(wanted))
    except measuring.OutOfTime:
        raise TooSmall(
            f"reading one text of {sample.size} tokens takes longer than the budget of {as_seconds(budget.seconds)}; give more seconds."
        ) from None
    return {name: [dataclasses.replace(c, out=None) for c in found[name]] for name in wanted}


def choose(names: list[str], layers: Iterable[str | int] | None) -> list[str]:
    """Layers by their names, short names or numbers.

    >>> choose(["encoder.0.attention", "encoder.1.attention"], [1])
    ['encoder.1.attention']
    """
    if layers is None:
        return names
    by_word = {**dict(zip(short_names(names), names, strict=True)), **{name: name for name in names}}
    found = []
    for layer in layers:
        if isinstance(layer, int) and -len(names) <= layer < len(names):
            found.append(names[layer])
        elif str(layer) in by_word:
            found.append(by_word[str(layer)])
        else:
            raise ValueError(f"there is no layer {layer!r}; there are {len(names)}: {', '.join(short_names(names))}.")
    if not found:
        raise ValueError("no layer was chosen; name at least one, or leave out `layers` for all.")
    return list(dict.fromkeys(found))


def _split(texts: list[Layers]) -> Gathered:
    """Every second text is learned from; layers whose keys come from elsewhere are left out."""
    left_out = {
        name: "its keys come from another sequence"
        for text in texts
        for name, captures in text.items()
        if any(c.q.shape[-2] != c.k.shape[-2] or c.mask.offset for c in captures)
    }
    judged, fitted = ({}, {})
    for place, there in ((0, judged), (1, fitted)):
        for text in texts[place::2]:
            for name, captures in text.items():
                if name not in left_out:
                    there.setdefault(name, []).extend(captures)
    if not judged:
        raise ValueError("no layer can be benched: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()) + ".")
    return Gathered(judged, fitted, left_out)
