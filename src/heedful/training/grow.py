"""Grow: a Trainer callback that lets attention layers grow while they train: when, where and as much as their loss asks for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..enlarging import enlarge
from ..growing import Loss, growth_of_batch, model_loss
from ..huggingface.adopt import of_layer, sizes_of
from ..huggingface.layer import Resized
from ..rules.grow import Room
from ..scan import evaluating
from ..statistics.growth import Growth
from ..widening import Widener
from .loading import follow_sizes
from .ranks import Wrapper, summed, summed_growths, world

HELD = 5  # every fifth example judges the steps
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Grow(TrainerCallback):
    """Every so many steps, measure what `new` more dims of q.k would gain each layer, and grow those that gain most.

    `budget` is the share of the model's first parameters that growth may add in all. A growth is predicted, searched for on examples
    held out of the measurement, and undone to one that changes nothing where it disappoints; the optimiser's state is carried. The
    Trainer's log_history tells of each. A Trainer that resumes takes the sizes of its checkpoint; under DDP all processes decide alike.

        Trainer(model, args, train_dataset=texts, callbacks=[Grow(every=200, new=4, budget=0.05)]).train()
    """

    every: int = 100
    new: int = 2
    budget: float = 0.05
    examples: int = 64  # of the training set, drawn evenly
    batch: int = 8
    least: float = 0.25  # of the best layer's gain, that a layer must have to grow
    worth: float = 0.0  # share of the loss that one nat of change per query must gain before anything grows
    loss: Loss = model_loss
    events: list[dict[str, Any]] = field(default_factory=list)
    _wrapper: Wrapper | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or self.new < 1 or self.examples < 4 or self.budget < 0:
            raise ValueError(
                f"{self} cannot grow; give every and new of at least 1, examples of at least 4, a budget of 0 or more."
            )

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        sizes_of(model)  # refuse a family that cannot be resized, before training
        follow_sizes(model)
        self._wrapper = Wrapper(model)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, train_dataloader: Any = None, **_: Any
    ) -> None:
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        event = self.measure(model, getattr(optimizer, "optimizer", optimizer), train_dataloader, args.device)
        event["step"] = state.global_step
        self.events.append(event)
        state.log_history.append(event)
        log.info("grow: %s", event)

    def measure(self, model: nn.Module, optimizer: Any, loader: Any, device: Any) -> dict[str, Any]:
        """Measure, decide and grow; what was found and done."""
        taught, held = self._drawn(loader, device)
        growths = self._growths(model, taught)
        ready = {name: _widener(model, name, growth) for name, growth in growths.items()}
        gains = {name: one.score(self.new) for name, one in ready.items()}
        costs = {name: _cost(self.new, one) for name, one in ready.items()}
        mean = next(iter(growths.values())).mean_loss
        found = {"grow_gain": max(gains.values()) ** 0.5 / max(mean, 1e-12), "grow_layers": 0}
        chosen = Room(self._room(model), self.least).layers(gains, costs) if found["grow_gain"] >= self.worth else []
        if not chosen:
            return found
        wanted = {"qk": dict.fromkeys(chosen, self.new)}
        _, searches = enlarge(model, growths, wanted, lambda: self._held_loss(model, held), optimizer)
        if self._wrapper is not None:
            self._wrapper.rebuild()
        step = searches["qk"]
        added = sum(costs[name] for name in chosen)
        return {
            **found,
            "grow_layers": len(chosen),
            "grow_added": added,
            "grow_predicted": step.predicted,
            "grow_realised": step.realised,
        }

    def _drawn(self, loader: Any, device: Any) -> tuple[list[Any], list[Any]]:
        """Batches to measure on and held-out ones, of this process's share of examples."""
        data = getattr(loader, "dataset", None)
        if data is None or not hasattr(data, "__len__"):
            raise ValueError(
                "Grow draws its examples from a training set that has a length; give the Trainer one that is not a stream."
            )
        rank, count = world()
        many = min(self.examples * count, len(data)) // count * count
        if many < 4 * count:
            raise ValueError(f"the training set has {len(data)} examples; Grow needs 4 for each of {count} processes.")
        own = [data[i * len(data) // many] for i in range(many)][rank::count]
        held = own[2::HELD]
        kept = {id(one) for one in held}

        def batches(some: list[Any]) -> list[Any]:
            made = [loader.collate_fn(some[i : i + self.batch]) for i in range(0, len(some), self.batch)]
            return [{key: x.to(device) if hasattr(x, "to") else x for key, x in one.items()} for one in made]

        rest = [one for one in own if id(one) not in kept]
        return [batches(rest[0::2]), batches(rest[1::2])], batches(held)

    def _growths(self, model: nn.Module, folds: list[Any]) -> dict[str, Growth]:
        """The statistics of all processes, added once."""
        total: dict[str, Growth] = {}
        with evaluating(model):
            for fold, batches in enumerate(folds):
                for inputs in batches:
                    part = growth_of_batch(model, inputs, self.loss, fold)
                    total = {name: total[name] + one if name in total else one for name, one in part.items()}
        return summed_growths(total)

    @torch.no_grad()
    def _held_loss(self, model: nn.Module, batches: list[Any]) -> float:
        found = [self.loss(model, inputs) for inputs in batches]
        total, count = summed(sum(float(value) for value, _ in found), sum(many for _, many in found))
        return total / max(count, 1.0)

    def _room(self, model: nn.Module) -> int:
        """How many parameters may still be added; what was added shows in the sizes, in a resumed run too."""
        added = sum(_added(module) for module in model.modules() if isinstance(module, Resized))
        return int(self.budget * (sum(p.numel() for p in model.parameters()) - added)) - added


def _widener(model: nn.Module, name: str, growth: Growth) -> Widener:
    module: Any = model.get_submodule(name)
    _, found, sizes = of_layer(model, name)
    return Widener(name, found, sizes, growth, float(getattr(module, "scaling", 1.0)))


def _cost(new: int, one: Widener) -> int:
    """The parameters that so many dims of q.k add to every head of a layer."""
    return new * sum(len(dims) * (w.shape[1] + (b is not None)) for dims, w, b in _sides(one.sizes, one.found))


def _added(module: Resized) -> int:
    """The parameters that a layer has beyond those it had at first, in q.k."""
    first, now = module.first, module.sizes
    made = [getattr(module, part) for part in module.names[:2]]
    pairs = ((first.queries, now.queries), (first.qk, now.qk))
    return sum((sum(b) - sum(a)) * (m.weight.shape[1] + (m.bias is not None)) for m, (a, b) in zip(made, pairs, strict=True))


def _sides(sizes: Any, found: Any) -> Iterator[tuple[Any, Any, Any]]:
    yield sizes.queries, found.q, found.b_q
    yield sizes.qk, found.k, found.b_k
