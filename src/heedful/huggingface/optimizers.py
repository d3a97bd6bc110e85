"""Optimisers: what Adam, AdamW and SGD know about an attention layer's parameters, carried over to the parameters it has after growing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from .adopt import Matrices, finisher, of_layer
from .layer import Resized

ROLES = ("q", "k", "v", "o")
Change = Callable[[str, Matrices], Matrices]


@dataclass(frozen=True, eq=False)
class _Layer:
    """What is known about one layer before it changes: its parameters by role, their state as matrices, what has no entries."""

    params: dict[str, nn.Parameter]
    moments: dict[str, Matrices]
    rest: dict[str, dict[str, Any]]  # by role: steps and the like


class Carrier:
    """The state of an optimiser for layers that are about to grow; `settle` puts their new parameters in the place of the old.

    Moments of new entries are zero, steps go on, groups keep their settings.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, layers: Iterable[str]):
        self.model, self.optimizer = model, optimizer
        self.layers = {name: _noted(model, name, optimizer) for name in layers}

    def settle(self, widened: Change) -> None:
        """Take the parameters that the layers have now; `widened` gives a layer's moments their new shape, with zeros."""
        for name, before in self.layers.items():
            after = parameters(self.model, name)
            moments = {key: widened(name, found) for key, found in before.moments.items()}
            for role, param in after.items():
                self._join(before.params[role], param)
                if role in before.rest:
                    self.optimizer.state[param] = dict(_copied(before.rest[role]))
                    for key, found in moments.items():
                        if (held := getattr(found, role)) is not None:
                            self.optimizer.state[param][key] = _stored(self.model, name, role, held).to(param.device)
            for role, param in before.params.items():
                if after.get(role) is not param:
                    self._leave(param)
        self._sort()

    def _join(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Put a parameter into the group of the one that it stands for."""
        for group in self.optimizer.param_groups:
            if any(p is old for p in group["params"]) and not any(p is new for p in group["params"]):
                group["params"].append(new)

    def _leave(self, old: nn.Parameter) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not old]
        self.optimizer.state.pop(old, None)

    def _sort(self) -> None:
        """In the model's order, in which an optimiser that is made anew would have them."""
        order = {id(p): i for i, p in enumerate(self.model.parameters())}
        for group in self.optimizer.param_groups:
            group["params"].sort(key=lambda p: order.get(id(p), len(order)))


def parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """A layer's parameters by role: q, k, v, o, b_q ...; one that holds several matrices stands for each."""
    module: Any = model.get_submodule(name)
    places, places_of = of_layer(model, name)[0], {}
    parts = list(module.names) if isinstance(module, Resized) else [place.module for place in (places.q, places.k, places.v)]
    for role, owner in zip(ROLES, [*(module.get_submodule(part) for part in parts), finisher(model, name, places.o)], strict=True):
        places_of[role] = owner.weight
        if owner.bias is not None:
            places_of[f"b_{role}"] = owner.bias
    return places_of


def _noted(model: nn.Module, name: str, optimizer: Optimizer) -> _Layer:
    params = parameters(model, name)
    known = {role: optimizer.state[p] for role, p in params.items() if p in optimizer.state}
    shaped = {key for role, held in known.items() for key, x in held.items() if _shaped(x, params[role])}
    moments = {key: _as_weights(model, name, params, {role: held.get(key) for role, held in known.items()}) for key in shaped}
    rest = {role: {key: x for key, x in held.items() if not _shaped(x, params[role])} for role, held in known.items()}
    return _Layer(params, moments, rest)


def _shaped(x: Any, param: nn.Parameter) -> bool:
    return isinstance(x, Tensor) and x.shape == param.shape and x.ndim > 0


def _as_weights(model: nn.Module, name: str, params: Mapping[str, nn.Parameter], states: Mapping[str, Any]) -> Matrices:
    """The matrices that the layer would have with this state as its weights; fused and transposed ones are read as weights are."""
    kept = {role: p.data for role, p in params.items()}
    try:
        for role, p in params.items():
            state = states.get(role)
            p.data = torch.zeros_like(kept[role]) if state is None else state.to(kept[role].device)
        found = of_layer(model, name)[1]
        own = {f.name: x.detach().clone() for f in fields(Matrices) if (x := getattr(found, f.name)) is not None}
        return replace(found, **own)
    finally:
        for role, p in params.items():
            p.data = kept[role]


def _stored(model: nn.Module, name: str, role: str, matrix: Tensor) -> Tensor:
    """As the module keeps it: transposed in a Conv1D."""
    module: Any = model.get_submodule(name)
    owner = finisher(model, name, module.places.o) if role == "o" else None
    return matrix.mT.contiguous() if isinstance(owner, Conv1D) else matrix.contiguous()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Steps are tensors that each parameter counts for itself."""
    return {key: x.clone() if isinstance(x, Tensor) else x for key, x in state.items()}
