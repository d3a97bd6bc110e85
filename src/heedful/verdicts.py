"""Verdicts: what findings say, in plain sentences that carry their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .ops.profile import WINDOWS

if TYPE_CHECKING:
    from .findings import Findings

NAMED = 6  # heads that a sentence names


def verdicts(findings: Findings) -> list[str]:
    """The sentences that hold for these findings, the most useful first."""
    heads = _Heads(findings)
    rules = (_sinks, _near, _flat, _sharp, _dims, _collapse, _overflow, _precision, _cut, _unseen)
    return [sentence for rule in rules for sentence in rule(findings, heads)]


class _Heads:
    """The heads of all layers in one row, so that sentences can count them."""

    def __init__(self, findings: Findings):
        self.results = findings.results()
        shapes = findings.about.layers
        self.layers = [name for name in self.results for _ in range(shapes[name].heads)]
        short = dict(zip(self.results, short_names(list(self.results)), strict=True))
        self.names = [head_name(short[name], head) for name in self.results for head in range(shapes[name].heads)]
        self.own = torch.tensor([not shapes[name].cross for name in self.layers], dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.names)

    def value(self, column: str) -> torch.Tensor:
        """A column over all heads, nan where a layer lacks it."""
        parts = [found[column].value.double() for found in self.results.values() if column in found]
        return torch.cat(parts) if len(parts) == len(self.results) and parts else torch.full((len(self),), torch.nan).double()

    def error(self, column: str) -> torch.Tensor:
        parts = [found[column].error.double() for found in self.results.values() if column in found]
        return torch.cat(parts) if len(parts) == len(self.results) and parts else torch.full((len(self),), torch.nan).double()

    def some(self, chosen: torch.Tensor, verb: str) -> str:
        """How many were chosen and what they do; the verb is given in the plural."""
        count = int(chosen.sum())
        first, _, rest = verb.partition(" ")
        one = {"have": "has", "are": "is"}.get(first, first + "s")
        return f"{count} of {len(self)} heads {one if count == 1 else first} {rest}"

    def list(self, chosen: torch.Tensor, order: torch.Tensor) -> str:
        """The names of the chosen heads, the largest first."""
        places = [i for i in order.nan_to_num(-torch.inf).argsort(descending=True).tolist() if chosen[i]]
        named = ", ".join(self.names[i] for i in places[:NAMED])
        return named + (f" and {len(places) - NAMED} more" if len(places) > NAMED else "")


def head_name(layer: str, head: int) -> str:
    """How a head is called.

    >>> head_name("3", 11), head_name("decoder.3", 11)
    ('L3.H11', 'decoder.3.H11')
    """
    return f"{'L' if layer.isdecimal() else ''}{layer}.H{head}"


def short_names(names: list[str]) -> list[str]:
    """Layer names without what they all share.

    >>> short_names(["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"])
    ['0', '1']
    """
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    while len(parts) > 1 and all(len(p) > 1 for p in parts) and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]
    return [".".join(p) for p in parts]


def _sinks(findings: Findings, heads: _Heads) -> Iterator[str]:
    sink = heads.value("sink")
    parked = (sink > 0.5) & heads.own
    if parked.any():
        yield (
            f"{heads.some(parked, 'put over half of their mass on the first token')}, "
            f"where a head parks that has nothing to say: {heads.list(parked, sink)}."
        )


def _near(findings: Findings, heads: _Heads) -> Iterator[str]:
    """Only for texts much longer than the window: in short ones everything is near."""
    window = heads.value("window99")
    typical = findings.about.tokens / max(1, findings.about.texts)
    for width in WINDOWS:
        near = (window <= width) & heads.own
        if width * 4 <= typical and near.sum() >= max(1, len(heads) // 20):
            yield (
                f"{heads.some(near, f'hold 99 % of their mass less than {width} tokens away')} (texts of {typical:.0f} tokens on average): "
                f"{heads.list(near, -window)}. A window would do there."
            )
            return


def _flat(findings: Findings, heads: _Heads) -> Iterator[str]:
    even = heads.value("evenness")
    flat = even > 0.95
    if flat.any():
        yield (
            f"{heads.some(flat, 'look at all keys nearly alike')} (entropy over 95 % of the most there can be): "
            f"{heads.list(flat, even)}, averaging the text."
        )


def _sharp(findings: Findings, heads: _Heads) -> Iterator[str]:
    peak = heads.value("peak")
    sharp = peak > 0.9
    if sharp.any():
        yield f"{heads.some(sharp, 'give one key over 90 % of a row on average')}: {heads.list(sharp, peak)}."


def _dims(findings: Findings, heads: _Heads) -> Iterator[str]:
    for column, what, size in (
        ("key_dims", "the logits' variance", lambda layer: layer.dim),
        ("value_dims", "the output", lambda layer: layer.width),
    ):
        used = heads.value(column)
        if used.isnan().any() or not len(heads):
            continue
        room = torch.tensor([size(findings.about.layers[name]) for name in heads.layers]).double()
        spare = room - used
        place = int(spare.argmax())
        yield (
            f"99 % of {what} fits in {used.sum().item():.0f} of {room.sum().item():.0f} {column.split('_')[0]} dims "
            f"({100 * spare.sum().item() / room.sum().item():.0f} % spare); most idle is {heads.names[place]}, "
            f"with {used[place].item():.0f} of {room[place].item():.0f} in use."
        )


def _collapse(findings: Findings, heads: _Heads) -> Iterator[str]:
    stacks: dict[str, list[tuple[float, float]]] = {}
    for row in findings.by_depth():
        stacks.setdefault(row["depth"].rpartition(" ")[0], []).append((row["residual"], row["similarity"]))
    for stack, found in stacks.items():
        (first, _), (last, alike) = found[0], found[-1]
        lowest = min(residual for residual, _ in found)
        state = "the tokens have become nearly alike: rank collapse" if last < 0.1 else "no rank collapse"
        where = f" in {stack}" if len(stacks) > 1 else ""
        yield (
            f"The tokens' distance from their mean{where} goes from {first:.2f} of their norm to {last:.2f} over {len(found) - 1} blocks "
            f"(lowest {lowest:.2f}; mean cosine at the end {alike:.2f}): {state}."
        )


def _overflow(findings: Findings, heads: _Heads) -> Iterator[str]:
    largest = heads.value("largest_logit")
    if (largest > 50).any():
        place = int(largest.nan_to_num(-torch.inf).argmax())
        seen = "" if findings.about.rows is None else "at least "
        yield (
            f"The largest logit is {seen}{largest[place].item():.0f}, in {heads.names[place]}: such a row looks at one key whatever the rest; "
            "in training, watch that it does not grow."
        )


def _precision(findings: Findings, heads: _Heads) -> Iterator[str]:
    """How exact sampled figures are; where one row stands for many, the sample itself cannot tell."""
    rows, error = findings.about.rows, heads.error("entropy")
    if rows is None or not len(heads):
        return
    rest, advice = (
        f"These figures rest on {rows} query {'row' if rows == 1 else 'rows'} of each longer text",
        "Scan with all rows for exact ones.",
    )
    worst = error.nan_to_num(0).max().item()
    if error.isnan().all() and heads.value("entropy").isfinite().any():
        yield f"{rest}: how exact they are, so few rows do not tell. {advice}"
    elif worst > 0:
        yield f"{rest}: head entropies are known to within {2 * worst:.3f} nats (two standard errors). {advice}"


def _cut(findings: Findings, heads: _Heads) -> Iterator[str]:
    about = findings.about
    if about.truncated:
        were = "text was" if about.truncated == 1 else "texts were"
        yield f"{about.truncated} {were} longer than {about.length} tokens and cut there ({about.texts} texts in all)."


def _unseen(findings: Findings, heads: _Heads) -> Iterator[str]:
    missed = findings.about.missed
    if missed:
        some = ", ".join(list(missed)[:3]) + (" ..." if len(missed) > 3 else "")
        yield f"{len(missed)} attention modules were not looked at ({some}): {next(iter(missed.values()))}."
