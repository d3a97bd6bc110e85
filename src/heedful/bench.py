"""Bench: what may replace the attention of a model, at which lengths, and what is lost: measured on its own q, k and v."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .about import versions
from .attention import Capture, Mechanism
from .benching.budget import Budget, TooSmall, as_bytes, as_seconds
from .benching.calls import OWN
from .benching.contender import Contender, chosen
from .benching.gathering import Gathered, check, of_captures, of_texts
from .benching.race import Race
from .benching.result import About, Bench
from .checkpoint import Checkpoint, load
from .measuring import free_memory, machine
from .progress import Bar, bar
from .spec import size

LENGTHS = (512, 1024, 2048, 4096, 8192)
SHORTEST = 8
LEARNING = 0.5  # of the time that is left, for all that mechanisms learn


def bench(
    model: str | Path | nn.Module | Checkpoint | Mapping[str, Sequence[Capture]],
    texts: Any = None,
    mechanisms: Iterable[Mechanism | type[Mechanism] | str] | None = None,
    lengths: Iterable[int] = LENGTHS,
    seconds: float = 300.0,
    memory: int | str | None = None,
    layers: Iterable[str | int] | None = None,
    limit: int = 8,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = False,
) -> Bench:
    """Find out what each mechanism takes and loses on a model's own q, k and v, at each length.

    `model` and `texts` are those of `scan`, of which `limit` are read; or captures of `hd.capture` come in place of both. Mechanisms with `fit`
    learn from every second text, and all are judged on the others. Times and memory are of one layer that stands for all; beyond the longest
    text its rows are drawn again and again for them, and no error is known. Never more than `seconds` and `memory` (bytes, "4GB"; half of
    what is free) are taken: what does not fit is left out and says so. On a CPU a memory below about 500 MB holds only roughly, as what torch
    and the model load at their first calls comes on top. With `out` the bench is saved there.
    """
    wanted: tuple[int, ...] = _lengths(lengths)
    contenders = [Contender(m) for m in chosen(mechanisms)]
    _check(model, texts, seconds, limit)
    checkpoint = None if isinstance(model, Mapping) else load(model)
    budget = Budget(float(seconds), _memory(memory, model if checkpoint is None else checkpoint))
    with bar("bench", seconds if progress else None, as_seconds) as shown, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        shown.say("reading")
        gathered = (
            of_captures(model, layers)  # type: ignore[arg-type]
            if checkpoint is None
            else of_texts(checkpoint, texts, limit, layers, max(wanted), budget)
        )
        race = _race(contenders, gathered, budget, seed, shown)
        wanted = tuple(sorted({*wanted, *([] if min(wanted) <= race.tokens else [race.tokens])}))
        race.warm()
        _learn(race, gathered)
        race.run(wanted)
    found = Bench(_about(checkpoint, race, gathered, heard), wanted, tuple(c.row() for c in contenders))
    _refuse_emptiness(found)
    if out is not None:
        found.save(out)
    return found


def _lengths(lengths: Iterable[int]) -> tuple[int, ...]:
    found: list[int] = sorted(set(lengths))
    if not found:
        raise ValueError("no length was given; give at least one, such as 512.")
    if not all(isinstance(length, int) for length in found) or found[0] < SHORTEST:
        raise ValueError(f"lengths are {found}; each must be a whole number of at least {SHORTEST} tokens.")
    return tuple(found)


def _check(model: Any, texts: Any, seconds: float, limit: int) -> None:
    if isinstance(model, Mapping) == (texts is not None):
        given = "captures are benched as they are" if isinstance(model, Mapping) else "a model needs texts to read"
        raise ValueError(f"{given}; give a model and texts, or captures alone.")
    if isinstance(model, Mapping):
        check(model)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"seconds is {seconds}; give how long the bench may take, such as 300.")
    if limit < 1:
        raise ValueError(f"limit is {limit}; read at least 1 text.")


def _memory(memory: int | str | None, source: Any) -> int:
    if memory is None:
        held = next(c.q for captures in source.values() for c in captures) if isinstance(source, Mapping) else source
        return free_memory(held.device) // 2
    wanted = size(memory)
    if wanted < 1:
        raise ValueError(f"memory is {memory}; give how many bytes the bench may take, such as 4GB.")
    return wanted


def _race(contenders: list[Contender], gathered: Gathered, budget: Budget, seed: int, shown: Bar) -> Race:
    """The contenders at the start, each with the layers that it can honour."""
    budget.held = gathered.bytes
    for contender in contenders:
        contender.take(gathered.judged)

    def say(what: str) -> None:
        shown.say(what)
        shown.reach(budget.spent)

    return Race(contenders, _stands_for_all(gathered.judged), gathered.judged, budget, seed, say)


def _stands_for_all(layers: dict[str, list[Capture]]) -> str:
    """The layer to be timed: in the middle of those with the fewest rules."""
    names = list(layers)

    def rank(name: str) -> tuple[bool, bool, float]:
        mask = layers[name][0].mask
        return bool(mask.demands & OWN), mask.window is not None, abs(names.index(name) - (len(names) - 1) / 2)

    return min(names, key=rank)


def _learn(race: Race, gathered: Gathered) -> None:
    """Mechanisms that learn do so, with an equal share of the time for each."""
    learners = [c for c in race.contenders if c.learns and c.by_layer]
    for number, contender in enumerate(learners):
        race.say(f"{contender.name} learns")
        if not all(gathered.fitted.get(name) for name in contender.by_layer):
            why = "it learns from texts other than those it is judged on; give at least 2 texts"
            contender.give_up(list(contender.by_layer), why)
            continue
        contender.fit(gathered.fitted, race.budget.left * LEARNING / (len(learners) - number), race.budget, race.timed)


def _about(checkpoint: Checkpoint | None, race: Race, gathered: Gathered, heard: list) -> About:
    call = race.source.first
    sizes = {"heads": call.q.shape[1], "key_heads": call.k.shape[1], "dim": call.q.shape[-1], "width": call.v.shape[-1]}
    return About(
        model="captures" if checkpoint is None else checkpoint.name,
        texts=max(map(len, gathered.judged.values())),
        fitted=max(map(len, gathered.fitted.values()), default=0),
        tokens=race.tokens,
        layers={name: captures[0].q.shape[1] for name, captures in gathered.judged.items()},
        timed=race.timed,
        shape={**sizes, "element_bytes": call.q.element_size()},
        rules=tuple(sorted(call.mask.demands)),
        seed=race.seed,
        seconds=race.budget.seconds,
        memory=race.budget.memory,
        spent=round(race.budget.spent, 2),
        left_out=gathered.left_out,
        warned=_warned([str(w.message) for w in heard if issubclass(w.category, UserWarning)]),
        machine=machine(),
        versions=versions(),
    )


def _warned(heard: list[str]) -> tuple[str, ...]:
    """Each warning once, whatever its numbers are."""
    kinds: dict[str, list[str]] = {}
    for said in heard:
        kinds.setdefault(re.sub(r"\d+(\.\d+)?", "", said), []).append(said)
    return tuple(same[0] + (f" (and {len(same) - 1} like it)" if len(same) > 1 else "") for same in kinds.values())


def _refuse_emptiness(found: Bench) -> None:
    """A budget that does not even suffice for exact attention at the shortest length."""
    first = found.exact.cells[found.lengths[0]]
    if "forward" not in first.costs:
        why = first.missing.get("forward", "not measured")
        budget = f"{as_seconds(found.about.seconds)} and {as_bytes(found.about.memory)}"
        raise TooSmall(f"exact attention over {found.lengths[0]} tokens was {why}; a budget of {budget} is too small, give more.")
