"""Resize: a model with fewer dims in its heads, chosen and fitted on what passes through them while it reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import Checkpoint, load
from .doctor import made_up
from .huggingface.adopt import adopt, matrices, reshape, sizes_of
from .huggingface.confirm import confirm
from .huggingface.layer import Sizes
from .huggingface.sizes import natives
from .inputs import read
from .plan import Plan, Resize, each
from .progress import bar
from .rules import Ladder, Rule, Uniform
from .scan import evaluating, prepare, run, scan
from .shortening import Cut, Lost, Seen, Shortener
from .statistics import Moments
from .texts import Item, items

TOKENS = 16  # that moments need for each dim of a head
HELD = 5  # every fifth text is held out


@dataclass(frozen=True)
class Change:
    """What became of a layer: its sizes before and after, and what was lost on the texts it was fitted to and on others."""

    layer: str
    before: Sizes
    after: Sizes
    predicted: Lost
    measured: Lost | None = None


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller model, its changes by layer, and the held-out texts to compare it on."""

    checkpoint: Checkpoint
    changes: tuple[Change, ...]
    held: list[Item]


def shrink(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any,
    qk: int | Rule | None = None,
    v: int | Rule | None = None,
    held: Any = None,
    limit: int | None = None,
    batch: int = 8,
    length: int | None = None,
    progress: bool = False,
) -> Shrunk:
    """A copy of the model with fewer dims of q.k and of v, as near to it as those dims allow on these texts.

    `qk` and `v` are a size for every head or a rule (`hd.rules.Budget(0.75)`, `Tolerance(0.01)`); None leaves them. Errors are measured on the
    texts `held`, or on every fifth of `texts`.

    >>> import heedful as hd
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=99)).eval()
    >>> shorter = hd.shrink(model, [torch.randperm(99)[:40].tolist() for _ in range(9)], qk=3)
    >>> shorter.checkpoint.model.encoder.layer[0].attention.self.query
    Linear(in_features=8, out_features=6, bias=True)
    """
    checkpoint = load(model)
    if qk is None and v is None:
        raise ValueError("nothing is asked for: give qk or v, a size or a rule such as hd.rules.Budget(0.75).")
    _possible(sizes_of(checkpoint.model), qk, v)
    taught, others = _split(checkpoint, texts, held, limit, length)
    adopted = _adopted(checkpoint)
    known = moments(adopted, taught, batch, length, progress)
    beyond = moments(adopted, others, batch, length, progress, least=1)
    ready = {name: _shortener(adopted.model, name, Seen.of(found)) for name, found in known.items()}
    plan = choose(ready, qk, v)
    changes = _change(adopted.model, plan, ready, {name: Seen.of(found) for name, found in beyond.items()}, progress)
    return Shrunk(adopted, tuple(changes), others)


def apply(
    model: str | Path | nn.Module | Checkpoint, plan: Plan, texts: Any = None, batch: int = 8, length: int | None = None
) -> Checkpoint:
    """A new checkpoint with a plan's sizes; the given one stays as it is.

    The dims that are kept are those that do best on the texts; without texts, those of plain truncation of the weights.
    """
    checkpoint = load(model)
    sizes = sizes_of(checkpoint.model)
    plan.check(natives(checkpoint.model), getattr(checkpoint.config, "model_type", None))
    for name, change in plan.layers.items():
        _possible(
            {name: sizes[name]}, *(max(each(dims, 1)) if dims is not None else None for dims in (change.qk, change.v)), change.pairs
        )
    adopted = _adopted(checkpoint)
    seen = {} if texts is None else moments(adopted, items(texts), batch, length)
    ready = {}
    for name in plan.layers:
        found, own = matrices(adopted.model, name), sizes[name]
        known = Seen.of(seen[name]) if name in seen else Seen.of_weights(found, own)
        ready[name] = _shortener(adopted.model, name, known)
    _change(adopted.model, plan, ready, {}, False)
    return adopted


def choose(ready: Mapping[str, Shortener], qk: int | Rule | None, v: int | Rule | None) -> Plan:
    """The sizes that rules give the layers."""
    found: dict[str, dict[str, Any]] = {name: {} for name in ready}
    if qk is not None:
        _chosen(found, ready, qk if isinstance(qk, Rule) else Uniform(qk), "qk")
    if v is not None:
        _chosen(found, ready, v if isinstance(v, Rule) else Uniform(v), "v")
    return Plan({name: Resize(**sizes) for name, sizes in found.items()})


def _chosen(found: dict[str, dict[str, Any]], ready: Mapping[str, Shortener], rule: Rule, what: str) -> None:
    ladders = [ladder for one in ready.values() for ladder in (one.qk_ladders() if what == "qk" else one.v_ladders())]
    steps = rule.steps(ladders)
    for name, one in ready.items():
        dims = [0] * len(one.sizes.qk)
        kept: list[list[int]] = [[] for _ in dims]
        for ladder, count in zip(ladders, steps, strict=True):
            if ladder.layer == name:
                dims[ladder.head] += ladder.cost * count
                if what == "qk" and one.sizes.pairs is not None and ladder.cost == 2:
                    places = one.pairs[ladder.head].order[:count].sort().values.tolist()
                    kept[ladder.head] = [one.sizes.pairs[ladder.head][i] for i in places]
        found[name][what] = tuple(dims)
        if what == "qk" and one.sizes.pairs is not None:
            found[name]["pairs"] = tuple(map(tuple, kept))


def moments(
    checkpoint: Checkpoint, texts: list[Item], batch: int, length: int | None, progress: bool = False, least: int = TOKENS
) -> dict[str, Moments]:
    """The moments of every layer on these texts; an error where they are too few, or not finite."""
    found = scan(checkpoint, texts, batch=batch, length=length, statistics=(Moments,), progress=progress)
    known: dict[str, Moments] = {name: held["Moments"] for name, held in found.layers.items()}  # type: ignore[misc]
    for name, one in known.items():
        wanted = least * max(one.queries.shape[-1], one.outputs.shape[-1])
        if min(one.count, one.sources) < wanted:
            raise ValueError(
                f"{int(min(one.count, one.sources))} tokens were read, too few for {name}; heads of its size need {wanted} ({least} for each dim): "
                "give more texts."
            )
        if not all(bool(torch.isfinite(x).all()) for x in one.tensors.values()):
            raise ValueError(
                f"{name} gives NaN or infinite q, k or outputs; look at the weights, and load the model with dtype=torch.float32."
            )
    return known


def _shortener(model: nn.Module, name: str, seen: Seen) -> Shortener:
    module: Any = model.get_submodule(name)
    return Shortener(name, matrices(model, name), module.sizes, seen, float(module.scaling))


def _adopted(checkpoint: Checkpoint) -> Checkpoint:
    """A copy whose layers have free sizes, confirmed to compute what the model computes."""
    model = copy.deepcopy(checkpoint.model)
    adopt(model)
    with evaluating(checkpoint.model), evaluating(model):
        inputs = made_up(checkpoint)
        if getattr(checkpoint.config, "is_encoder_decoder", False) and "input_ids" not in inputs:
            inputs["decoder_input_ids"] = torch.arange(4, device=checkpoint.device).expand(2, -1)
        inputs = prepare(checkpoint.model, inputs)
        confirm(checkpoint.model, model, lambda one: run(one, inputs))
    return Checkpoint(model, checkpoint.processor, checkpoint.name)


def _change(model: nn.Module, plan: Plan, ready: Mapping[str, Shortener], held: Mapping[str, Seen], progress: bool) -> list[Change]:
    """Give the layers their new matrices; what is lost is told for each."""
    changes = []
    with bar("resize", len(plan.layers) if progress else None, lambda n: f"{n:.0f} layers") as shown:
        for name, wanted in plan.layers.items():
            one = ready[name]
            cuts = _cuts(one, wanted)
            for cut in cuts:  # v after qk, of the matrices that those left
                reshape(model, name, cut.matrices, cut.sizes)
            beyond = None if name not in held else Shortener(name, one.found, one.sizes, held[name], one.scale)
            measured = None if beyond is None else _total([beyond.lost(cut, one.centre) for cut in cuts], beyond)
            after = cuts[-1].sizes if cuts else one.sizes
            changes.append(Change(name, one.sizes, after, _total([one.lost(cut) for cut in cuts], one), measured))
            shown.advance(1)
    return changes


def _cuts(one: Shortener, wanted: Resize) -> list[Cut]:
    """The changes of q.k and of v, each on top of the one before."""
    cuts = []
    if wanted.qk is not None:
        named = one if wanted.pairs is None else one.keeping(wanted.pairs)
        dims = each(wanted.qk, len(one.sizes.qk))
        cuts.append(named.qk(*_units(named, dims, wanted.pairs)))
    if wanted.v is not None:
        before = cuts[-1] if cuts else Cut(one.found, one.sizes)
        found = Shortener(one.name, before.matrices, before.sizes, one.seen, one.scale)
        cuts.append(found.v(each(wanted.v, len(one.sizes.v))))
    return cuts


def _units(one: Shortener, dims: tuple[int, ...], pairs: tuple[tuple[int, ...], ...] | None) -> tuple[list[int], list[int]]:
    """How many frequency pairs and how many other dims make up the dims of each key head."""
    if one.sizes.pairs is None:
        return [0] * len(dims), list(dims)
    if pairs is not None:
        return [len(kept) for kept in pairs], [d - 2 * len(kept) for d, kept in zip(dims, pairs, strict=True)]
    ladders: list[Ladder] = one.qk_ladders()
    turning, staying = [0] * len(dims), [0] * len(dims)
    for head, size in enumerate(dims):
        own = [ladder for ladder in ladders if ladder.head == head]
        for ladder, count in zip(own, Uniform(size).steps(own), strict=True):
            (turning if ladder.cost == 2 else staying)[head] = count
    return turning, staying


def _total(parts: list[Lost], one: Shortener) -> Lost:
    whole = one.lost(Cut(one.found, one.sizes))
    return Lost(sum(p.qk for p in parts), whole.qk_of, sum(p.v for p in parts), whole.v_of)


def _possible(sizes: Mapping[str, Sizes], qk: int | Rule | None, v: int | Rule | None, pairs: Any = None) -> None:
    """Refuse sizes that no head can have, before anything is read."""
    for word, dims in (("qk", qk), ("v", v)):
        if dims is None or isinstance(dims, Rule):
            continue
        for name, own in sizes.items():
            most = max(own.qk if word == "qk" else own.v)
            if not 1 <= dims <= most:
                raise ValueError(f"{word} is {dims}, but heads of {name} have {most} dims; to shrink them give 1 to {most}.")
            turning = own.pairs is not None and 2 * len(own.pairs[0]) == own.qk[0]
            if word == "qk" and turning and pairs is None and dims % 2:
                raise ValueError(
                    f"qk is {dims}, but the dims of {name} turn in {len(own.pairs[0])} frequency pairs; give an even number up to {most}."  # type: ignore[index]
                )


def _split(checkpoint: Checkpoint, texts: Any, held: Any, limit: int | None, length: int | None) -> tuple[list[Item], list[Item]]:
    """Texts to fit to, and others to measure on."""
    samples = [s.item for group in read(checkpoint, items(texts, limit), 1, length, limit).batches for s in group]
    if held is not None:
        return samples, [s.item for group in read(checkpoint, items(held, limit), 1, length, limit).batches for s in group]
    if len(samples) < 2:
        raise ValueError("there is one text (or one piece of a long one); give at least 2, or others to measure on as `held`.")
    others = samples[min(2, len(samples) - 1) :: HELD]
    kept = {id(item) for item in others}
    return [item for item in samples if id(item) not in kept], others
