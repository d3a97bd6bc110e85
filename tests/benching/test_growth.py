"""Growth over lengths: exponents, crossovers and what comes next, on figures that are known."""

import math

import pytest

from heedful.benching.growth import MARGIN, crossover, exponent, predicted

LENGTHS = [2**i for i in range(9, 16)]


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_an_exponent_is_found(power):
    assert exponent({n: 3e-9 * n**power for n in LENGTHS}) == pytest.approx(power)


def test_an_exponent_is_that_of_the_larger_lengths():
    squares = {n: float(n) ** 2 for n in LENGTHS}
    assert exponent(squares | dict.fromkeys(LENGTHS[:3], 1e9)) == pytest.approx(2.0)  # what starts slowly does not count


def test_an_exponent_needs_two_lengths():
    assert exponent({512: 1.0}) is None
    assert exponent({}) is None
    assert exponent({512: 1.0, 1024: 8.0}) == pytest.approx(3.0)


def test_a_crossover_is_where_two_powers_meet():
    square, straight = ({n: a * n**p for n in LENGTHS} for a, p in ((1e-9, 2), (3e-6, 1)))
    found = crossover(straight, square)
    assert found.length == pytest.approx(3000)
    assert str(found) == "3,000"
    assert not found.always


def test_a_difference_too_small_to_count_is_no_crossover():
    assert crossover({512: 1.0, 1024: 0.97}, {512: 0.5, 1024: 1.0}).length is None
    assert crossover({512: 1.0, 1024: 0.9}, {512: 0.5, 1024: 1.0}).length is not None
    assert crossover({512: 1.0, 1024: 0.5}, {512: 0.5, 1024: 1.0}, doubted=[1024]).length is None
    assert crossover({512: 0.99, 1024: 0.5}, {512: 1.0, 1024: 1.0}).length == pytest.approx(1024)


def test_never_and_always_say_up_to_and_from_where():
    slow, fast = ({n: a * n for n in LENGTHS} for a in (2.0, 1.0))
    assert str(crossover(slow, fast)) == "never up to 32,768"
    assert str(crossover(fast, slow)) == "always (from 512)"
    assert crossover(fast, slow).always


def test_what_is_faster_only_in_between_is_not_faster_from_there_on():
    mine = {512: 2.0, 1024: 0.5, 2048: 2.0, 4096: 0.5}
    theirs = dict.fromkeys(mine, 1.0)
    assert crossover(mine, theirs).length == pytest.approx(math.sqrt(2048 * 4096))
    assert crossover({512: 0.5, 1024: 2.0}, theirs).length is None


def test_a_crossover_needs_a_common_length():
    assert crossover({512: 1.0}, {1024: 1.0}) is None


def test_equal_times_are_not_faster():
    assert str(crossover({512: 1.0}, {512: 1.0})) == "never up to 512"


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_a_prediction_is_the_power_of_the_two_longest_with_a_margin(power):
    figures = {n: n**power for n in (128, 512, 1024)}
    assert predicted(figures, 4096) == pytest.approx(MARGIN * 4096**power)


def test_a_prediction_from_one_length_or_a_falling_one_is_cautious():
    assert predicted({512: 1.0}, 1024) == 4 * MARGIN
    assert predicted({512: 2.0, 1024: 1.0}, 2048) == 2 * MARGIN
