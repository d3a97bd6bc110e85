"""Seconds, bytes and deadlines."""

import pytest
import torch

from heedful import measuring
from heedful.measuring import Deadline, OutOfTime, machine, peak_memory, rounds_of, timing_of, timings


class Clock:
    """Time that passes only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measuring, "clock", made)
    return made


def lasting(clock, seconds, calls=None):
    def case():
        clock.now += seconds
        if calls is not None:
            calls.append(seconds)

    return case


def test_medians_are_those_of_the_cases(clock):
    found = timings({"short": lasting(clock, 0.001), "long": lasting(clock, 0.5)}, rounds=5)
    assert found["short"].median == pytest.approx(0.001)
    assert found["long"].median == pytest.approx(0.5)
    assert found["long"].rounds == 5


def test_cases_take_turns_and_change_their_order(clock):
    calls = []
    rounds_of({"a": lasting(clock, 1, calls), "b": lasting(clock, 2, calls)}, {"a": 1, "b": 1}, rounds=2, budget=9)
    assert calls == [1, 2, 2, 1]


def test_rounds_stop_when_the_budget_is_spent(clock):
    found = rounds_of({"a": lasting(clock, 1)}, {"a": 1}, rounds=9, budget=3.5, least=1)
    assert found["a"].rounds == 4


def test_quartiles_lie_within_what_was_measured():
    found = timing_of([0.001, 0.01])
    assert 0.001 <= found.low <= found.median <= found.high <= 0.01


@pytest.mark.skipif(peak_memory(lambda: None) is None, reason="this system does not tell")
def test_the_peak_counts_what_is_freed_again():
    size = 2**25
    found = peak_memory(lambda: torch.ones(size // 4).sum(), torch.device("cpu"))
    assert 0.9 * size < found < 1.5 * size
    again = peak_memory(lambda: torch.ones(size // 4).sum(), torch.device("cpu"))
    assert 0.9 * size < again < 1.5 * size


def test_a_deadline_stops_work_between_two_calls_of_torch(clock):
    def work():
        for _ in range(10):
            torch.ones(2).sum()
            clock.now += 0.3

    with pytest.raises(OutOfTime), Deadline(1.0):
        work()
    assert clock.now == pytest.approx(1.2)


def test_the_machine_has_no_name():
    assert {"processor", "cores", "threads", "torch", "date"} <= machine().keys()
    import platform

    assert platform.node() not in map(str, machine().values())


def test_a_deadline_leaves_gradients_as_they_were(monkeypatch):
    now = iter([0.0, *[100.0] * 20])
    monkeypatch.setattr("heedful.measuring.clock", lambda: next(now))
    with pytest.raises(OutOfTime), Deadline(1.0), torch.no_grad():
        torch.zeros(1)
    assert torch.is_grad_enabled()
