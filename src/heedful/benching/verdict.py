"""Verdict: what a bench says, in plain sentences that carry their numbers, an honest "don't" among them."""

from __future__ import annotations

from collections.abc import Iterator

from .result import FAR, Bench, Row

LEAD = 1.05  # times faster, from which on a difference counts
NAMES = {"forward": "forward", "training": "forward and backward"}


def verdicts(bench: Bench) -> list[str]:
    """The sentences that hold for a bench: all mechanisms together, then each."""
    rivals = [row for row in bench.rows[1:] if row.kind != "Recurrent"]
    return [*_overall(bench, rivals), *(_of(bench, row) for row in rivals), *_recurrent(bench), *_notes(bench)]


def number(x: float) -> str:
    """Two digits of a share.

    >>> number(0.123), number(0.0012), number(1.5), number(0.0)
    ('.12', '.0012', '1.5', '0')
    """
    text = "0" if x == 0 else f"{x:.2g}"
    return text[1:] if text.startswith("0.") else text


def _overall(bench: Bench, rivals: list[Row]) -> Iterator[str]:
    """Below which length nothing pays, and what is best at the shortest and the longest."""
    measured = sorted(bench.exact.figures("forward").keys() & {n for row in rivals for n in row.figures("forward")})
    if not measured:
        return
    close = [row for row in rivals if (e := row.error()) is not None and e.median <= FAR]
    starts = [c for row in close if (c := bench.crossover(row.name)) is not None and c.length is not None]
    within = f"within {number(FAR)} median output error"
    if not starts:
        yield f"Nothing here is both faster than exact attention and {within}, up to {measured[-1]:,} tokens (forward): don't."
    elif not any(c.always for c in starts):
        first = min(starts, key=lambda c: c.length or 0)
        yield f"Below about {first} tokens nothing {within} is faster than exact attention (forward); at {measured[0]:,}: don't."
    for length in dict.fromkeys((measured[0], measured[-1])):
        yield _best(bench, rivals, length)


def _best(bench: Bench, rivals: list[Row], length: int) -> str:
    """The fastest at a length of those that give nearly what attention gives."""
    faster = [(s, row) for row in rivals if (s := bench.speedup(row.name, length)) is not None and s > LEAD]
    close = [(s, row) for s, row in faster if (e := row.error()) is not None and e.median <= FAR]
    if close:
        s, row = max(close, key=lambda pair: pair[0])
        return f"At {length:,} tokens the fastest within {number(FAR)} median output error is {row.name}: {s:.1f}x, {_lost(bench, row)}."
    if faster:
        verb = "is" if len(faster) == 1 else "are"
        return (
            f"At {length:,} tokens {len(faster)} of {len(rivals)} {verb} faster, none of them known to be within {number(FAR)} median "
            "output error: don't."
        )
    return f"At {length:,} tokens none of {len(rivals)} is faster than exact attention: don't."


def _of(bench: Bench, row: Row) -> str:
    """One mechanism: its speed at the longest length that it shares with exact attention, its error, from where on it pays."""
    common = sorted(row.figures("forward").keys() & bench.exact.figures("forward").keys())
    if not common:
        return f"{row.name}: not measured ({_why(row)})."
    length = common[-1]
    speed = bench.speedup(row.name, length) or 0.0
    training = bench.speedup(row.name, length, "training")
    both = "" if training is None else f" ({_times(training)}, forward and backward)"
    told = f"{row.name}: {_times(speed)} than exact attention at {length:,} tokens{both}, {_lost(bench, row)}"
    where = bench.crossover(row.name)
    pays = "" if where is None or where.length is None or where.always else f"; faster from about {where} tokens on"
    return f"{told}{pays}{_dont(row, speed)}."


def _times(speed: float) -> str:
    if speed >= LEAD:
        return f"{speed:.1f}x faster"
    return f"{1 / speed:.1f}x slower" if speed <= 1 / LEAD else "no faster"


def _lost(bench: Bench, row: Row) -> str:
    """The error of a row, where it was measured, as part of a sentence."""
    error = row.error()
    if error is None:
        return "its error is not known"
    where = max(length for length, cell in row.cells.items() if cell.errors)
    return f"{number(error.median)} median output error at {where:,}, {error.far} of {error.heads} heads above {number(FAR)}"


def _dont(row: Row, speed: float) -> str:
    error = row.error()
    if speed < LEAD:
        return ": don't, exact attention is not slower"
    return ": don't, it computes something else" if error is not None and error.median > FAR else ""


def _why(row: Row) -> str:
    said = [*row.refused.values(), *(why for cell in row.cells.values() for why in cell.missing.values())]
    return said[0].rstrip(".") if said else "no reason is known"


def _recurrent(bench: Bench) -> Iterator[str]:
    for row in bench.rows:
        common = sorted(row.figures("forward").keys() & bench.exact.figures("forward").keys())
        if row.kind == "Recurrent" and common:
            speed = bench.speedup(row.name, common[-1]) or 0.0
            yield f"{row.name}, for its time alone: {_times(speed)} than exact attention at {common[-1]:,} tokens, which it reads one after the other."


def _notes(bench: Bench) -> Iterator[str]:
    about = bench.about
    if bench.extended:
        yield (
            f"Beyond {about.tokens:,} tokens, the longest text here, times are of its rows drawn again and again (in no order, with repeats); "
            "errors there are not known."
        )
    for name, why in about.left_out.items():
        yield f"Left out: {name}, {why}."
    for row in bench.rows:
        if row.cells and row.refused:
            yield f"{row.name} stands for {len(about.layers) - len(row.refused)} of {len(about.layers)} layers: {next(iter(row.refused.values()))}"
    yield from about.warned
