"""Contenders: the mechanisms that a bench compares, each with what it learned for every layer and what is known of it so far."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import measuring
from ..attention import Capture, Mechanism
from ..mechanisms import ALL, Softmax, Unsupported, from_settings
from .budget import Budget, as_bytes
from .calls import demands, prefix
from .growth import predicted
from .recurrent import Recurrent
from .result import Cell, Row
from .theory import SEQUENTIAL

RECURRENT = "recurrent (LSTM)"
TRIED = 3  # steps of a fit that learns in steps, to see what one takes
PACE = 0.7  # of the time for learning, that steps are to take
FEWEST = 20  # steps, below which a fit is not worth its name
PROBES = (8, 4)  # parts of a text that a fit is tried on first, to see what memory it takes


def short(mechanism: Mechanism) -> str:
    """A mechanism with those settings that are not its defaults.

    >>> from heedful.mechanisms import Performer
    >>> short(Performer()), short(Performer(features=64))
    ('Performer()', 'Performer(features=64)')
    """
    if isinstance(mechanism, Recurrent):
        return RECURRENT
    shown = []
    for f in dataclasses.fields(mechanism):  # type: ignore[arg-type]
        value = getattr(mechanism, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if f.init and f.repr and not (type(value) is type(default) and value == default):
            shown.append(f"{f.name}={value!r}")
    return f"{type(mechanism).__name__}({', '.join(shown)})"


def usual() -> list[Mechanism]:
    """All rivals of exact attention that need no settings, and a recurrent layer."""
    needless = [m for m in ALL if m.rival and all(_has_default(f) for f in dataclasses.fields(m) if f.init)]  # type: ignore[arg-type]
    return [m() for m in needless] + [Recurrent()]


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def chosen(mechanisms: Iterable[Mechanism | type[Mechanism] | str] | None) -> list[Mechanism]:
    """The mechanisms of a bench, exact attention first and none twice."""
    wanted = usual() if mechanisms is None else [_made(m) for m in mechanisms]
    if not wanted:
        raise ValueError("no mechanism was given; name at least one, or leave out `mechanisms` for all.")
    named = {short(m): m for m in [Softmax(), *wanted]}
    return list(named.values())


def _made(given: Mechanism | type[Mechanism] | str) -> Mechanism:
    if isinstance(given, str):
        return Recurrent() if given == "Recurrent" else from_settings(given)
    if isinstance(given, type) and issubclass(given, Mechanism):
        return given()
    if not isinstance(given, Mechanism):
        raise ValueError(f"{given!r} is no mechanism; give e.g. Performer(features=128), its class or its name.")
    return given


@dataclass(eq=False)
class Contender:
    """One mechanism in a bench."""

    mechanism: Mechanism
    by_layer: dict[str, Mechanism] = field(default_factory=dict)  # as it answers each layer
    refused: dict[str, str] = field(default_factory=dict)
    cells: dict[int, Cell] = field(default_factory=dict)
    seconds: dict[str, dict[int, float]] = field(default_factory=lambda: {"forward": {}, "training": {}})  # as first seen
    bytes: dict[str, dict[int, float]] = field(default_factory=lambda: {"forward": {}, "training": {}})
    failed: dict[str, str] = field(default_factory=dict)  # by pass, or `error`: no more of it
    fit_seconds: float | None = None
    steps: int | None = None  # of a fit, where its own number takes too long

    @property
    def name(self) -> str:
        return short(self.mechanism)

    @property
    def learns(self) -> bool:
        return hasattr(self.mechanism, "fit")

    @property
    def estimates(self) -> bool:
        """Whether it is to give what attention gives."""
        return not isinstance(self.mechanism, Recurrent)

    def cell(self, length: int) -> Cell:
        return self.cells.setdefault(length, Cell())

    def take(self, layers: dict[str, list[Capture]]) -> None:
        """Stand for each layer whose calls can be honoured; what it refuses is kept with the reason."""
        for name, captures in layers.items():
            try:
                for capture in captures:
                    self.mechanism.refuse(demands(capture))
            except Unsupported as refusal:
                self.refused[name] = str(refusal)
            else:
                self.by_layer[name] = copy.deepcopy(self.mechanism)

    def fit(self, layers: dict[str, list[Capture]], seconds: float, budget: Budget, first: str | None = None) -> None:
        """Learn from captures, layer by layer and one before all others, as many layers as there is time for."""
        start, wanted = measuring.clock(), sorted(self.by_layer, key=lambda name: name != first)
        for number, name in enumerate(wanted):
            taken = measuring.clock() - start
            try:
                if number == 0:
                    self._probe(layers[name], seconds, budget)
                    self._pace(layers[name], seconds - (measuring.clock() - start))
                elif taken / number * 1.5 > seconds - taken:
                    raise measuring.OutOfTime
                self.by_layer[name] = self._fitted(layers[name], seconds - (measuring.clock() - start), len(wanted) - number)
            except measuring.OutOfTime:
                self.give_up(
                    wanted[number:], f"fitted on {number} of {len(wanted)} layers: the budget allows no more time to learn"
                )
                break
            except Exception as error:  # a mechanism of anyone's: the bench goes on without it
                self.give_up(wanted[number:], f"cannot be fitted: {told(error)}")
                break
        self.fit_seconds = measuring.clock() - start

    def _fitted(self, captures: Sequence[Capture], seconds: float, layers: int, **options: Any) -> Mechanism:
        fresh = copy.deepcopy(self.mechanism)
        fit: Any = fresh.fit
        known = inspect.signature(fit).parameters
        given = {"seconds": seconds / layers, "steps": self.steps, **options}
        with measuring.Deadline(seconds):
            found = fit(captures, **{name: x for name, x in given.items() if name in known and x is not None})
        return fresh if found is None else found

    def _pace(self, captures: Sequence[Capture], seconds: float) -> None:
        """As many steps for each layer as there is time for, where a mechanism learns in steps."""
        usual = getattr(inspect.signature(self.mechanism.fit).parameters.get("steps"), "default", None)  # type: ignore[attr-defined]
        if not isinstance(usual, int) or usual <= 2 * TRIED:
            return
        taken = []
        for steps in (TRIED, 2 * TRIED):
            start = measuring.clock()
            self._fitted(captures, seconds, 1, steps=steps)
            taken.append(measuring.clock() - start)
        each = max((taken[1] - taken[0]) / TRIED, taken[1] / (2 * TRIED) / 2)
        room = (seconds - sum(taken)) * PACE / len(self.by_layer)
        fits = int(room / max(each, 1e-9))
        if fits < FEWEST:
            raise measuring.OutOfTime
        if fits < usual:
            self.steps = fits
            warnings.warn(f"{self.name} learned in {fits} of its {usual} steps for lack of time; give more seconds.", stacklevel=2)

    def _probe(self, captures: Sequence[Capture], seconds: float, budget: Budget) -> None:
        """Learn from short pieces, to see that whole texts stay within the memory."""
        known: dict[int, float] = {}
        whole = max(c.q.shape[-2] for c in captures)
        for length in (whole // part for part in PROBES if whole // part >= 32):
            pieces = [prefix(c, length) for c in captures]
            try:
                found = measuring.peak_memory(
                    lambda pieces=pieces: self._fitted(pieces, seconds / 4, 1, steps=TRIED), pieces[0].q.device
                )
            except ValueError:  # too short for it to learn from
                continue
            known[length] = max(1.0, float(found or 0))
        if known and predicted(known, whole) > budget.room:
            raise ValueError(f"to learn would take about {as_bytes(predicted(known, whole))}")

    def give_up(self, layers: Iterable[str], why: str) -> None:
        """Do without these layers."""
        for name in layers:
            self.by_layer.pop(name, None)
            self.refused[name] = why

    def row(self) -> Row:
        """What was found."""
        kind = type(self.mechanism).__name__
        return Row(
            self.name,
            kind,
            self.mechanism.settings,
            SEQUENTIAL.get(kind, "-"),
            dict(sorted(self.cells.items())),
            self.refused,
            self.fit_seconds,
        )


def told(error: Exception) -> str:
    """An error in a sentence: of ours as it is, of others with its type."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ValueError) and first else f"{type(error).__name__}: {first}"
