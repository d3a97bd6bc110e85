"""Race: every mechanism at one length after the other, in turns, as far as the budget goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import measuring
from ..attention import Capture
from .budget import Budget, as_seconds
from .calls import CASES, Distance, Source, answer, exactly, prefix
from .contender import Contender, told
from .result import PASSES, Cost

FEW = 8  # tokens of a call that only loads what torch needs
PROBED = 64  # tokens of the first look at each mechanism, before longer calls are dared
STEP = 4  # at most so many times longer is the next look
ROUNDS = 5
ONE = 0.5  # of the time that is left, for one case
AGAIN = 0.02  # of the time that is left: a first call that takes less is made twice
SHARE = 0.25  # of the time that is left, for the rounds of one length


def ladder(lengths: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The lengths to climb, and whether each was asked for: others only tell what comes next.

    >>> list(ladder((1024, 8192)))
    [(64, False), (256, False), (1024, True), (4096, False), (8192, True)]
    """
    reached = min(PROBED, lengths[0] // 2)
    yield reached, False
    for wanted in lengths:
        while reached * STEP < wanted:
            reached *= STEP
            yield reached, False
        reached = wanted
        yield wanted, True


@dataclass
class Race:
    """A bench under way: the contenders, the layer that they are timed on, and the texts that they are judged on."""

    contenders: list[Contender]
    timed: str
    judged: dict[str, list[Capture]]
    budget: Budget
    seed: int = 0
    say: Callable[[str], None] = lambda what: None
    source: Source = field(init=False)

    def __post_init__(self):
        self.source = Source(self.judged[self.timed], self.seed)

    @property
    def tokens(self) -> int:
        """Of the longest text that errors can be judged on."""
        return self.source.tokens

    def warm(self) -> None:
        """Exact attention over a few tokens, so that what torch loads and starts at its first calls is in no figure."""
        call = self.source.call(min(FEW, self.tokens))
        for case in CASES.values():
            case(self.contenders[0].mechanism, call)()

    def run(self, lengths: Sequence[int]) -> None:
        for length, asked in ladder(lengths):
            seen = self._look(length, asked)
            if asked and length <= self.tokens:
                self._judge(length, sum(self._pending(seen).values()))
            if asked:
                self._time(length, seen, last=length == lengths[-1])

    def _look(self, length: int, asked: bool) -> dict[tuple[Contender, str], Callable[[], Any]]:
        """Call each once, the cheapest first after exact attention, and keep what it took: the cases that can be timed."""
        seen: dict[tuple[Contender, str], Callable[[], Any]] = {}
        none = self.source.refusal(length, self.budget)
        call = None if none else self.source.call(length)
        for contender, which in self._order(length):
            pending = sum(self._pending(seen).values()) if asked else 0.0
            why = none or contender.failed.get(which) or self._refusal(contender, which, length, pending)
            if why is None:
                assert call is not None
                self.say(f"{contender.name}, {length:,} tokens, {which}")
                case = CASES[which](contender.by_layer[self.timed], call)
                why = self._first(contender, which, length, case)
                if why is None:
                    seen[contender, which] = case
            if why is not None and asked:
                contender.cell(length).missing[which] = f"not measured: {why}"
        return seen

    def _order(self, length: int) -> list[tuple[Contender, str]]:
        """Exact attention first, then who took least."""
        pairs = [(c, which) for c in self.contenders for which in PASSES]
        exact = self.contenders[0]
        return sorted(pairs, key=lambda p: (p[0] is not exact, max(p[0].seconds[p[1]].items(), default=(0, 0.0))[1]))

    def _refusal(self, contender: Contender, which: str, length: int, pending: float) -> str | None:
        if self.timed in contender.refused:
            return contender.refused[self.timed]
        if which == "training" and "forward" in contender.failed:
            return contender.failed["forward"]
        share = ONE if contender is not self.contenders[0] else ONE / 2  # exact attention leaves something to be compared with
        available = (self.budget.left - pending) * share
        return self.budget.refusal(length, contender.seconds[which], contender.bytes[which], available)

    def _first(self, contender: Contender, which: str, length: int, case: Callable[[], Any]) -> str | None:
        """A call or two, for the memory and to know what more will take; why it failed, where it did."""
        seen: list[tuple[float, float]] = []
        try:
            with measuring.Deadline(self.budget.left):
                while not seen or (len(seen) == 1 and seen[0][0] < AGAIN * self.budget.left):
                    seen.append(
                        _measured(case, self.source.first.q.device)
                    )  # what a first call loads and makes is not counted where a second is cheap
        except measuring.OutOfTime:
            contender.failed[which] = "it ran longer than the budget allows"
        except Exception as error:  # a mechanism of anyone's: the bench goes on without it
            return told(error)
        else:
            contender.seconds[which][length], contender.bytes[which][length] = (min(x) for x in zip(*seen, strict=True))
            if contender.bytes[which][length] > self.budget.room:
                contender.failed[which] = "it took more than the budget's memory"
        return contender.failed.get(which)

    @staticmethod
    def _pending(seen: dict[tuple[Contender, str], Any]) -> dict[tuple[Contender, str], float]:
        """The seconds of one round of each case."""
        return {(c, w): max(max(c.seconds[w].items())[1] * 1.2, 1.5 * measuring.LEAST) for c, w in seen}

    def _judge(self, length: int, pending: float) -> None:
        """The errors of all layers on the texts that are long enough."""
        fits = {n: [c for c in captures if c.q.shape[-2] >= length] for n, captures in self.judged.items()}
        if length not in self.contenders[0].seconds["forward"]:
            return
        entrants = [c for c in self.contenders if c.estimates and length in c.seconds["forward"]]
        texts, entrants = self._affordable(entrants, length, max(map(len, fits.values())), pending)
        for layer, captures in fits.items():
            self.say(f"errors of {layer}, {length:,} tokens")
            self._errors(entrants, layer, [prefix(c, length) for c in captures[:texts]])
        for contender in entrants:
            errors = contender.cell(length).errors
            bad = sum(x is None for found in errors.values() for x in found)
            if bad:
                contender.cell(length).missing["error"] = f"{bad} heads gave values that are not finite"

    def _affordable(self, entrants: list[Contender], length: int, most: int, pending: float) -> tuple[int, list[Contender]]:
        """How many texts can be judged on, and who is: the costliest are left out where not even one text can."""
        one = {c: c.seconds["forward"][length] * len(self.judged) for c in entrants}  # seconds for one text
        entrants = sorted(entrants, key=lambda c: one[c])
        room = (self.budget.left - pending) / 2
        while entrants:
            text = 2 * sum(one[c] for c in entrants)  # and the comparing
            if text <= room:
                return max(1, min(most, int(room / max(text, 1e-9)))), entrants
            dropped = entrants.pop()
            dropped.cell(length).missing["error"] = f"not measured: a text would take about {as_seconds(one[dropped])}"
        return 0, []

    @torch.no_grad()
    def _errors(self, entrants: list[Contender], layer: str, captures: list[Capture]) -> None:
        distances = {c: Distance() for c in entrants if layer in c.by_layer}
        for call in captures:
            exact = exactly(call)
            for contender, distance in list(distances.items()):
                try:
                    distance.add(answer(contender.by_layer[layer], call), exact, call)
                except Exception as error:  # a mechanism of anyone's: the bench goes on without it
                    contender.cell(call.q.shape[-2]).missing["error"] = told(error)
                    del distances[contender]
        for contender, distance in distances.items():
            if captures:
                contender.cell(captures[0].q.shape[-2]).errors[layer] = distance.relative()

    def _time(self, length: int, seen: dict[tuple[Contender, str], Callable[[], Any]], last: bool) -> None:
        """Rounds in turns; the costliest are left out where not even one round of all fits."""
        pending = self._pending(seen)
        for pair in sorted(seen, key=lambda p: pending[p], reverse=True):
            if sum(pending.values()) > self.budget.left:
                del seen[pair], pending[pair]
                pair[0].cell(length).missing[pair[1]] = "not measured: the budget's time was spent"
        if not seen:
            return
        room = self.budget.left * (0.9 if last else SHARE)
        rounds = max(1, min(ROUNDS, int(room / max(sum(pending.values()), 1e-9))))
        self.say(f"{rounds} rounds at {length:,} tokens")
        named = {f"{c.name} {w}": (c, w) for c, w in seen}
        repeats = {name: measuring.often(c.seconds[w][length]) for name, (c, w) in named.items()}
        cases = {name: seen[pair] for name, pair in named.items()}
        found = measuring.rounds_of(cases, repeats, rounds, room, least=1)
        for name, (contender, which) in named.items():
            timing, size = found[name], int(contender.bytes[which][length])
            contender.cell(length).costs[which] = Cost(timing.median, timing.low, timing.high, timing.rounds, size)


def _measured(case: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """The seconds and the bytes of one call, at least 1 byte, for logarithms."""
    taken: list[float] = []
    found = measuring.peak_memory(lambda: taken.append(measuring.seconds_of(case)), device)
    return taken[0], max(1.0, float(found or 0))
