"""A race keeps to its budget: told by a clock that only mechanisms move."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from heedful import Capture, Mask, Mechanism, bench, measuring
from heedful.benching.race import ladder
from heedful.mechanisms import Softmax

SECONDS = 100.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measuring, "clock", made)
    Slow.clock = made
    return made


@dataclass(eq=False)
class Slow(Mechanism):
    """Softmax that takes (tokens / 100)^power seconds, in as many steps as it is told."""

    power: float = 1.0
    steps: int = 1
    clock: ClassVar[Clock] = Clock()
    supports: ClassVar[frozenset[str]] = frozenset({"causal", "shared"})

    def attend(self, q, k, v, mask, scale):
        for _ in range(self.steps):
            self.clock.now += (q.shape[-2] / 100) ** self.power / self.steps
            q = torch.add(q, 0)
        return Softmax().attend(q, k, v, mask, scale)


def captures(tokens=64, count=2, **mask):
    made = [torch.randn(3, 1, 2, tokens, 8) for _ in range(count)]
    return {"0": [Capture("0", *x.unbind(), Mask(**mask), scale=8**-0.5) for x in made]}


def test_a_bench_never_takes_longer_than_its_budget(clock):
    found = bench(captures(), mechanisms=[Slow(1.0), Slow(2.0), Slow(2.0, 5)], lengths=(64, 256, 1024, 4096), seconds=SECONDS)
    assert clock.now <= SECONDS
    row = found.row("Slow(power=2.0)")
    assert 64 in row.figures("forward")
    assert 4096 not in row.figures("forward")
    assert re.search(r"not measured: one call would take about \d+ min", row.cells[4096].missing["forward"])


def test_lengths_far_apart_are_climbed_in_steps(clock):
    found = bench(captures(), mechanisms=[Slow(3.0)], lengths=(64, 8192), seconds=SECONDS)
    assert clock.now <= SECONDS
    assert "would take" in found.row("Slow").cells[8192].missing["forward"]


def test_a_sudden_step_is_stopped_between_two_calls_of_torch(clock):
    @dataclass(eq=False)
    class Sudden(Slow):
        def attend(self, q, k, v, mask, scale):
            self.power, self.steps = (8.0, 1000) if q.shape[-2] > 200 else (1.0, 1)
            return super().attend(q, k, v, mask, scale)

    found = bench(captures(), mechanisms=[Sudden()], lengths=(64, 256), seconds=SECONDS)
    assert clock.now <= SECONDS
    assert found.row("Sudden").cells[256].missing["forward"] == "not measured: it ran longer than the budget allows"


def test_learning_is_stopped_by_the_budget(clock):
    @dataclass(eq=False)
    class Learner(Slow):
        def fit(self, captures):
            for _ in range(1000):
                self.clock.now += 1.0
                torch.ones(1)

    found = bench(captures(), mechanisms=[Learner()], lengths=(64,), seconds=SECONDS)
    assert clock.now <= SECONDS
    assert "fitted on 0 of 1 layers" in found.row("Learner").refused["0"]
    assert 64 in found.exact.figures("forward")


def test_a_learner_is_judged_on_other_texts_than_it_learned_from(clock):
    seen = []

    @dataclass(eq=False)
    class Learner(Slow):
        def fit(self, captures):
            seen.extend(captures)

        def attend(self, q, k, v, mask, scale):
            judged.append(q.shape[-2])
            return super().attend(q, k, v, mask, scale)

    judged, given = [], captures(tokens=16, count=4)
    found = bench(given, mechanisms=[Learner()], lengths=(16,), seconds=SECONDS)
    assert [c in given["0"][1::2] for c in seen] == [True, True]
    assert (found.about.texts, found.about.fitted) == (2, 2)
    assert found.row("Learner").fit_seconds is not None


def test_a_learner_that_refuses_short_texts_learns_from_whole_ones(clock):
    @dataclass(eq=False)
    class Learner(Slow):
        def fit(self, captures):
            if captures[0].q.shape[-2] <= 128:
                raise ValueError("too short")

    found = bench(captures(tokens=512), mechanisms=[Learner()], lengths=(512,), seconds=1000.0)
    assert not found.row("Learner").refused
    assert 512 in found.row("Learner").figures("forward")


def test_one_that_learns_in_steps_makes_as_many_as_there_is_time_for(clock):
    made = []

    @dataclass(eq=False)
    class Learner(Slow):
        def fit(self, captures, steps=200):
            made.append(steps)
            for _ in range(steps):
                self.clock.now += 0.1
                torch.ones(1)

    given = {name: captures()["0"] for name in "012"}
    found = bench(given, mechanisms=[Learner()], lengths=(64,), seconds=SECONDS)
    assert not found.row("Learner").refused
    assert 20 <= made[-1] < 200
    assert any(f"Learner() learned in {made[-1]} of its 200 steps" in line for line in found.verdicts())
    assert clock.now <= SECONDS


def test_the_layer_that_is_timed_is_learned_first(clock):
    @dataclass(eq=False)
    class Learner(Slow):
        def fit(self, captures):
            self.clock.now += 10.0
            torch.ones(1)

    given = {name: captures()["0"] for name in "012345"}
    found = bench(given, mechanisms=[Learner()], lengths=(64,), seconds=SECONDS)
    row = found.row("Learner")
    assert found.about.timed not in row.refused
    assert 0 < len(row.refused) < 6
    assert 64 in row.figures("forward")
    assert " stands for " in " ".join(found.verdicts())


def test_a_learner_needs_a_second_text(clock):
    @dataclass(eq=False)
    class Learner(Slow):
        def fit(self, captures): ...

    found = bench(captures(count=1), mechanisms=[Learner()], lengths=(64,), seconds=SECONDS)
    assert "give at least 2 texts" in found.row("Learner").refused["0"]


def test_what_a_first_call_loads_is_loaded_before_memory_is_measured(monkeypatch, clock):
    events, attend = [], Softmax.attend

    def watched(self, *given, **extra):
        events.append("called")
        return attend(self, *given, **extra)

    def measured(case, device):
        events.append("measured")
        return case() and None

    monkeypatch.setattr(Softmax, "attend", watched)
    monkeypatch.setattr(measuring, "peak_memory", measured)
    bench(captures(), mechanisms=[Softmax()], lengths=(64,), seconds=SECONDS)
    assert events[:3] == ["called", "called", "measured"]  # forward, training


def test_memory_stays_within_the_budget(monkeypatch):
    @dataclass(eq=False)
    class Large(Slow):
        """A matrix of all pairs, as bytes."""

    asked = []

    def peak(case, device):
        case()
        asked.append(size := sizes.get(case_of[0], 0))
        return size

    sizes, case_of = {}, [0]

    def attend(self, q, k, v, mask, scale):
        case_of[0] = q.shape[-2]
        sizes[q.shape[-2]] = 4 * q.shape[-2] ** 2
        return Softmax().attend(q, k, v, mask, scale)

    monkeypatch.setattr(Large, "attend", attend)
    monkeypatch.setattr(measuring, "peak_memory", peak)
    limit = 3_000_000
    found = bench(captures(), mechanisms=[Large()], lengths=(64, 128, 256, 512, 1024), seconds=SECONDS, memory=limit)
    assert max(asked) <= limit
    assert "it would take about" in found.row("Large").cells[1024].missing["forward"]


def test_a_mechanism_that_breaks_is_listed_and_the_others_go_on(clock):
    @dataclass(eq=False)
    class Broken(Slow):
        def attend(self, q, k, v, mask, scale):
            if q.shape[-2] > 40:
                raise KeyError("no such thing")
            return super().attend(q, k, v, mask, scale)

    found = bench(captures(), mechanisms=[Broken(), Slow()], lengths=(32, 64), seconds=SECONDS)
    assert found.row("Broken").cells[64].missing["forward"] == "not measured: KeyError: 'no such thing'"
    assert 32 in found.row("Broken").figures("forward")
    assert 64 in found.row("Slow").figures("forward")


def test_values_that_are_not_finite_are_told(clock):
    @dataclass(eq=False)
    class Endless(Slow):
        def attend(self, q, k, v, mask, scale):
            return super().attend(q, k, v, mask, scale) * torch.tensor([[[[1.0]], [[torch.inf]]]])

    cell = bench(captures(), mechanisms=[Endless()], lengths=(64,), seconds=SECONDS).row("Endless").cells[64]
    assert cell.errors["0"][0] < 1e-6
    assert cell.errors["0"][1] is None
    assert "1 heads gave values that are not finite" in cell.missing["error"]


def test_the_ladder_climbs_by_four_and_ends_where_it_should():
    lengths = [n for n, _ in ladder((100, 65536))]
    assert [n for n, asked in ladder((100, 65536)) if asked] == [100, 65536]
    assert lengths == sorted(lengths)
    assert all(b <= 4 * a for a, b in pairwise(lengths))
