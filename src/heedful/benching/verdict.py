"""Verdict: what a bench says, in plain sentences that carry their numbers, an honest "don't" among them."""

from __future__ import annotations

from collections.abc import Iterator

from .growth import LEAD
from .result import FAR, Bench, Error, Row

NAMES = {"forward": "forward", "training": "forward and backward"}
NOTHING = 1e-5  # an output error below it is rounding
FEWEST = 3  # rounds, below which a sentence says so


def verdicts(bench: Bench) -> list[str]:
    """The sentences that hold for a bench: all mechanisms together, then each."""
    rivals = [row for row in bench.rows[1:] if row.kind != "Recurrent"]
    return [*_overall(bench, rivals), *_hasty(bench), *(_of(bench, row) for row in rivals), *_recurrent(bench), *_notes(bench)]


def number(x: float) -> str:
    """Two digits of a share.

    >>> number(0.123), number(0.0012), number(1.5), number(0.0)
    ('.12', '.0012', '1.5', '0')
    """
    text = "0" if x == 0 else f"{x:.2g}"
    return text[1:] if text.startswith("0.") else text


WITHIN = f"within {number(FAR)} median output error"


def _overall(bench: Bench, rivals: list[Row]) -> Iterator[str]:
    """Below which length nothing pays, and what is best at the shortest and the longest of those that errors are known at."""
    measured = sorted(bench.exact.figures("forward").keys() & {n for row in rivals for n in row.figures("forward")})
    if not measured:
        return
    judged = [length for length in measured if any(row.error(length) for row in rivals)]
    if judged:
        yield from _start(bench, rivals, judged)
    for length in dict.fromkeys((judged[0], judged[-1]) if judged else ()):
        yield _best(bench, rivals, length)
    if measured[-1] not in judged:
        yield f"At {measured[-1]:,} tokens no error is known, so times there recommend nothing."


def _start(bench: Bench, rivals: list[Row], judged: list[int]) -> Iterator[str]:
    """From where on something close is faster, as far as errors are known."""
    pays = [length for length in judged if any(_close(row, length) and bench.faster(row.name, length) for row in rivals)]
    if not pays:
        inference = " for inference" if any(_trained(bench, rivals, length) for length in judged) else ""
        yield f"Nothing here is both faster than exact attention and {WITHIN}, up to {judged[-1]:,} tokens (forward): don't{inference}."
    elif pays[0] != judged[0]:
        yield (
            f"Below about {_from(bench, rivals, pays[0])} tokens nothing {WITHIN} is faster than exact attention (forward); "
            f"at {judged[0]:,}: don't{' for inference' if _trained(bench, rivals, judged[0]) else ''}."
        )


def _from(bench: Bench, rivals: list[Row], length: int) -> str:
    """The first crossover of those that pay at a length, or the length where none comes before it."""
    paying = [row for row in rivals if _close(row, length) and bench.faster(row.name, length)]
    found = [c for row in paying if (c := bench.crossover(row.name)) is not None and c.length is not None and c.length <= length]
    return str(min(found, key=lambda c: c.length or 0)) if found else f"{length:,}"


def _close(row: Row, length: int) -> bool:
    """Whether a mechanism is known to give nearly what attention gives at that very length."""
    error = row.error(length)
    return error is not None and error.median <= FAR


def _best(bench: Bench, rivals: list[Row], length: int) -> str:
    """The fastest at a length of those that give nearly what attention gives there."""
    faster = [(bench.speedup(row.name, length) or 0.0, row) for row in rivals if bench.faster(row.name, length)]
    close = [(s, row) for s, row in faster if _close(row, length)]
    if close:
        s, row = max(close, key=lambda pair: pair[0])
        once = "".join(f" ({said})" for said in _once(bench, row, length))
        return f"At {length:,} tokens the fastest {WITHIN} (forward) is {row.name}: {s:.1f}x{once}, {_lost(bench, row, length)}."
    training = _trained(bench, rivals, length)
    if faster:
        verb = "is" if len(faster) == 1 else "are"
        return f"At {length:,} tokens {len(faster)} of {len(rivals)} {verb} faster (forward), none of them known to be {WITHIN} there: don't{training}."
    return f"At {length:,} tokens none of {len(rivals)} is faster than exact attention (forward): don't{training}."


def _trained(bench: Bench, rivals: list[Row], length: int) -> str:
    """To which use a "don't" of forward passes is bound, where something close is faster forward and backward."""
    close = [(bench.speedup(row.name, length, "training") or 0.0, row.name) for row in rivals if _close(row, length)]
    speed, name = max(close, default=(0.0, ""))
    return f" for inference; for training {name} is {_times(speed)}" if speed >= LEAD else ""


def _of(bench: Bench, row: Row) -> str:
    """One mechanism: its speed at the longest length that it shares with exact attention, its error, from where on it pays."""
    common = sorted(row.figures("forward").keys() & bench.exact.figures("forward").keys())
    if not common:
        return f"{row.name}: not measured ({_why(row)})."
    length = common[-1]
    speed = bench.speedup(row.name, length) or 0.0
    training = bench.speedup(row.name, length, "training")
    aside = [*([] if training is None else [f"{_times(training)}, forward and backward"]), *_once(bench, row, length)]
    told = f"{row.name}: {_times(speed)} than exact attention at {length:,} tokens"
    told += (f" ({'; '.join(aside)})" if aside else "") + f", {_lost(bench, row, length)}"
    where = bench.crossover(row.name)
    pays = "" if where is None or where.length is None or where.always else f"; faster from about {where} tokens on"
    return f"{told}{pays}{_dont(bench, row, length)}."


def _once(bench: Bench, row: Row, length: int) -> list[str]:
    """That figures rest on fewer than three rounds, where they do."""
    rounds = min(r.cells[length].costs["forward"].rounds for r in (row, bench.exact))
    return [] if rounds >= FEWEST else [f"timed {'once' if rounds == 1 else 'twice'} each"]


def _times(speed: float) -> str:
    if speed >= LEAD:
        return f"{speed:.1f}x faster"
    return f"{1 / speed:.1f}x slower" if speed <= 1 / LEAD else "no faster"


def _lost(bench: Bench, row: Row, length: int) -> str:
    """The error of a row at a length as part of a sentence; where it is not known there, that, and what is known."""
    error = row.error(length)
    if error is not None:
        return f"{_heads(error)} at {length:,}" + (
            ", where it is exact and tells nothing of longer texts" if vacuous(bench, row) else ""
        )
    unknown = f"its error at {length:,} is not known"
    if row.judged is None:
        return unknown
    if vacuous(bench, row):
        return f"{unknown} (exact at {row.judged:,}, as it reads every key there)"
    shorter, times = row.error(), bench.speedup(row.name, row.judged)
    then = "" if times is None else f", {_times(times)}"
    return unknown if shorter is None else f"{unknown} (at {row.judged:,}: {_heads(shorter)}{then})"


def vacuous(bench: Bench, row: Row) -> bool:
    """Whether a mechanism is judged only where it leaves nothing out, and timed where it may."""
    error, lengths = row.error(), row.figures("forward")
    return error is not None and error.worst < NOTHING and row is not bench.exact and max(lengths, default=0) > (row.judged or 0)


def _heads(error: Error) -> str:
    return f"{number(error.median)} median output error, {error.far} of {error.heads} heads above {number(FAR)}"


def _dont(bench: Bench, row: Row, length: int) -> str:
    """What not to use it for: a forward pass and training may differ, what it computes holds for both."""
    error, speeds = row.error(), [bench.speedup(row.name, length, which) for which in NAMES]
    forward, training = (speeds[0] or 0.0) >= LEAD, speeds[1] is not None and speeds[1] >= LEAD
    if (forward or training) and error is not None and error.median > FAR:
        return ": don't, it computes something else" + ("" if row.judged == length else f" at {row.judged:,} already")
    if forward and not training and speeds[1] is not None:
        return "; don't for training, exact attention is not slower"
    if training and not forward:
        return f": don't for inference, exact attention is not slower; for training it is {_times(speeds[1] or 0.0)}"
    return "" if forward else ": don't, exact attention is not slower"


def _why(row: Row) -> str:
    said = [*row.refused.values(), *(why for cell in row.cells.values() for why in cell.missing.values())]
    return said[0].rstrip(".") if said else "no reason is known"


def _recurrent(bench: Bench) -> Iterator[str]:
    for row in bench.rows:
        common = sorted(row.figures("forward").keys() & bench.exact.figures("forward").keys())
        if row.kind == "Recurrent" and common:
            speed = bench.speedup(row.name, common[-1]) or 0.0
            yield f"{row.name}, for its time alone: {_times(speed)} than exact attention at {common[-1]:,} tokens, which it reads one after the other."


def _hasty(bench: Bench) -> Iterator[str]:
    """Lengths where the budget left time for a round or two."""
    hasty = [
        f"{n:,}"
        for n in bench.lengths
        if any(c.rounds < FEWEST for r in bench.rows if n in r.cells for c in r.cells[n].costs.values())
    ]
    if hasty:
        yield (
            f"Times at {' and '.join(hasty)} tokens are of one or two rounds: differences below about 1.5x may be chance; "
            "give more seconds for better."
        )


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
        if row.cells and 0 < len(row.refused) < len(about.layers) and row.figures("forward"):
            yield f"{row.name} stands for {len(about.layers) - len(row.refused)} of {len(about.layers)} layers: {next(iter(row.refused.values()))}"
    yield from about.warned
