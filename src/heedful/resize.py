"""Resize: a model with fewer dims in its heads, chosen and fitted on what passes through them while it reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import Checkpoint, load
from .cutting import Change, change
from .doctor import made_up
from .findings import Findings
from .huggingface.adopt import adopt, matrices, sizes_of
from .huggingface.confirm import confirm
from .huggingface.layer import Sizes
from .huggingface.sizes import natives, parted
from .learning import known, moments, split
from .plan import Plan, Resize, each
from .preserving import preserve
from .rules import Rule, Uniform
from .scan import evaluating, prepare, run
from .shortening import Seen, Shortener
from .texts import Item, items


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
    taught, others = split(checkpoint, texts, held, limit, length)
    adopted = adopted_copy(checkpoint)
    seen = moments(adopted, taught, batch, length, progress)
    beyond = moments(adopted, others, batch, length, progress, least=1)
    ready = {name: _shortener(adopted.model, name, Seen.of(found)) for name, found in seen.items()}
    plan = choose(ready, qk, v)
    changes = change(adopted.model, plan, ready, {name: Seen.of(found) for name, found in beyond.items()}, progress)
    return Shrunk(adopted, tuple(changes), others)


def apply(
    model: str | Path | nn.Module | Checkpoint, plan: Plan, texts: Any = None, batch: int = 8, length: int | None = None
) -> Checkpoint:
    """A new checkpoint with a plan's sizes; the given one stays as it is.

    Heads that get larger compute what they did; `grow` lets them learn as well.

    The dims that are kept are those that do best on the texts, or on the findings of a scan of the same model; without either, those of plain
    truncation of the weights.
    """
    checkpoint = load(model)
    sizes = sizes_of(checkpoint.model)
    plan.check(natives(checkpoint.model), getattr(checkpoint.config, "model_type", None))
    less, more = parted(plan, sizes)
    for name, wanted in less.layers.items():
        for dims in set() if wanted.qk is None else set(each(wanted.qk, 1)):
            _possible({name: sizes[name]}, dims, None, wanted.pairs)
        for dims in set() if wanted.v is None else set(each(wanted.v, 1)):
            _possible({name: sizes[name]}, None, dims)
    adopted = adopted_copy(checkpoint)
    ready = shorteners(adopted, texts, batch, length, less.layers)
    change(adopted.model, less, ready, {}, False)
    preserve(adopted.model, more)
    return adopted


def sizes_by(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any,
    qk: int | Rule | None = None,
    v: int | Rule | None = None,
    length: int | None = None,
) -> Plan:
    """The plan that rules make of the texts, or of the findings of a scan, or of the weights alone (None); nothing is changed yet."""
    checkpoint = load(model)
    _possible(sizes_of(checkpoint.model), qk, v)
    adopted = adopted_copy(checkpoint)
    return choose(shorteners(adopted, texts, 8, length, sizes_of(adopted.model)), qk, v)


def shorteners(adopted: Checkpoint, texts: Any, batch: int, length: int | None, layers: Iterable[str]) -> dict[str, Shortener]:
    """What can be asked of the layers of an adopted model, by what the texts (or findings) say, or by its weights where there are none."""
    seen = {}
    if texts is not None:
        seen = known(texts) if isinstance(texts, Findings) else moments(adopted, items(texts), batch, length)
    ready = {}
    for name in layers:
        module: Any = adopted.model.get_submodule(name)
        own = Seen.of(seen[name]) if name in seen else Seen.of_weights(matrices(adopted.model, name), module.sizes)
        ready[name] = _shortener(adopted.model, name, own)
    return ready


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


def _shortener(model: nn.Module, name: str, seen: Seen) -> Shortener:
    module: Any = model.get_submodule(name)
    return Shortener(name, matrices(model, name), module.sizes, seen, float(module.scaling))


def adopted_copy(checkpoint: Checkpoint) -> Checkpoint:
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
