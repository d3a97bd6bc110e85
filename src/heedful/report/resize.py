"""A resized model in the terminal: every layer before and after, what was lost, and how the model as a whole compares."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..compare import Comparison
from ..enlarging import Grown
from ..resize import Change, Shrunk
from ..shortening import Lost


def resized(found: Shrunk | Grown, verdict: Comparison) -> Group:
    """What became of a model's layers, and of the model."""
    return shrunk(found, verdict) if isinstance(found, Shrunk) else grown(found, verdict)


def grown(found: Grown, verdict: Comparison) -> Group:
    """One line for each layer, with what its step was predicted to take off the loss; what it took off on other texts in all."""
    table = Table(title="dims by key head", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("layer")
    for name in ("q.k", "now", "v", "now", "damping", "loss predicted to fall by"):
        table.add_column(name, justify="right")
    for change in found.changes:
        sizes = [_dims(dims) for dims in (change.before.qk, change.after.qk, change.before.v, change.after.v)]
        table.add_row(Text(change.layer), *sizes, f"{change.damping:g}", f"{change.predicted:.2g}")
    told = f"the loss on held-out texts fell by {found.realised:.3g}, by {found.predicted:.3g} was predicted"
    kept = "no step lowered the loss on held-out texts as predicted: the new dims leave the model as it is, and are ready to train"
    lines = [told if found.realised > 0 else kept, *verdict.sentences()]
    return Group(table, "", *(Text(f"- {line}") for line in lines))


def shrunk(found: Shrunk, verdict: Comparison) -> Group:
    """One line for each layer; errors are relative root mean squares of logits and of outputs."""
    table = Table(
        title="dims by key head, and errors on the texts read and on others",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("layer")
    for name in ("q.k", "now", "v", "now", "logits off by", "measured", "output off by", "measured"):
        table.add_column(name, justify="right")
    for change in found.changes:
        table.add_row(Text(change.layer), *_cells(change))
    lines = [f"- {total(found)}", *(f"- {sentence}" for sentence in verdict.sentences())]
    return Group(table, "", *map(Text, lines))


def total(found: Shrunk) -> str:
    """Dims of all heads before and after."""
    parts = []
    for word, name in (("qk", "q.k"), ("v", "v")):
        before, after = (
            sum(sum(getattr(side, word)) for side in sides)
            for sides in zip(*((c.before, c.after) for c in found.changes), strict=True)
        )
        parts.append(f"{after} of {before} dims of {name}")
    return f"{' and '.join(parts)} stay; a cache of keys and values is that much smaller"


def _cells(change: Change) -> list[str]:
    before, after, predicted, measured = change.before, change.after, change.predicted, change.measured or Lost()
    errors = [f"{x:.3f}" for x in (predicted.logits, measured.logits, predicted.output, measured.output)]
    return [_dims(before.qk), _dims(after.qk), _dims(before.v), _dims(after.v), *errors]


def _dims(sizes: tuple[int, ...]) -> str:
    """One size, or the range of the heads' sizes.

    >>> _dims((8, 8)), _dims((3, 8))
    ('8', '3..8')
    """
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)}..{max(sizes)}"
