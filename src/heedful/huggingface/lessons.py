"""Lessons: one batch of a Hugging Face model forward and back, and every attention call with its states and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..attention import Capture
from ..lesson import Lesson
from .modules import Unreachable, attention_modules, passes
from .seam import watching

STATES, SOURCES = ("hidden_states",), ("key_value_states", "encoder_hidden_states")  # what attention modules call them


@dataclass
class _Call:
    """A call under way: its Capture, its states, and the output of the projection that reads its answer."""

    capture: Capture
    states: Tensor
    sources: Tensor | None
    returned: Tensor | None = None


@dataclass
class _Notes:
    """What hooks saw of one batch."""

    wanted: set[str] | None
    given: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)  # by layer, what its module was last called with
    calls: list[_Call] = field(default_factory=list)

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        named = dict(zip(_parameters(type(module)), args, strict=False)) | kwargs
        states, sources = (next((named[w] for w in words if isinstance(named.get(w), Tensor)), None) for words in (STATES, SOURCES))
        if states is not None:
            self.given[name] = states, sources

    def see(self, capture: Capture) -> None:
        if self.wanted is not None and capture.layer not in self.wanted:
            return
        if capture.layer not in self.given:
            raise Unreachable(
                f"{capture.layer} is not called with hidden_states, so what its queries are made from is not known; leave it out by layers=."
            )
        self.calls.append(_Call(capture, *self.given[capture.layer]))

    def projected(self, module: nn.Module, args: tuple, output: Any) -> None:
        """The first linear module that reads a call's answer is the layer's last projection."""
        last = self.calls[-1] if self.calls else None
        if last is None or last.returned is not None or last.capture.out is None or not args or not isinstance(args[0], Tensor):
            return
        answer = last.capture.out.transpose(1, 2)
        if args[0].numel() == answer.numel() and torch.equal(args[0].detach().flatten(), answer.detach().flatten()):
            last.returned = output


def lessons(model: nn.Module, loss: Callable[[], Tensor], layers: set[str] | None = None) -> tuple[Tensor, list[Lesson]]:
    """The loss that `loss` computes by letting the model read, and a Lesson for each attention call on the way, in order.

    The parameters' gradients are left as they are. A Lesson's gradients are those of this very loss.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9))
    >>> _, (lesson,) = lessons(model, lambda: model(torch.arange(5)[None]).last_hidden_state.square().sum())
    >>> lesson.layer, lesson.states.shape, lesson.gradient.shape, lesson.returned.shape
    ('encoder.layer.0.attention.self', torch.Size([1, 5, 8]), torch.Size([1, 2, 5, 4]), torch.Size([1, 5, 8]))
    """
    notes = _Notes(layers)
    with _learning(model), _noting(model, notes), torch.enable_grad():
        found = loss()
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            raise ValueError(
                "the loss must be one number that depends on the model's parameters; return its mean or sum as a tensor."
            )
        if not bool(torch.isfinite(found)):
            raise ValueError(f"the loss is {float(found.detach())}; look at the labels and the model's precision.")
        if not notes.calls:
            asked = (
                f" of {', '.join(sorted(layers))}; layers are named as in a scan's findings" if layers else " that could be seen"
            )
            raise Unreachable(f"{type(model).__name__} computed its loss without an attention call{asked}.")
        gradients = torch.autograd.grad(found, [t for call in notes.calls for t in _watched(call)], allow_unused=True)
    taken = iter(gradients)
    return found.detach(), [_lesson(call, [next(taken) for _ in _watched(call)]) for call in notes.calls]


def _watched(call: _Call) -> list[Tensor]:
    assert call.capture.out is not None
    return [call.capture.out] if call.returned is None else [call.capture.out, call.returned]


def _lesson(call: _Call, gradients: list[Tensor | None]) -> Lesson:
    """The call with its gradients; zeros where the loss does not depend on it."""
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(_watched(call), gradients, strict=True)]
    kept = {f.name: _detached(getattr(call.capture, f.name)) for f in fields(Capture)}
    returned = None if call.returned is None else found[1].reshape(*call.states.shape[:2], -1)
    return Lesson(**kept, states=call.states.detach(), sources=_detached(call.sources), gradient=found[0], returned=returned)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@contextmanager
def _noting(model: nn.Module, notes: _Notes) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in attention_modules(model).items():
            if passes(module):
                stack.callback(module.register_forward_pre_hook(partial(notes.enter, name), with_kwargs=True).remove)
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                stack.callback(module.register_forward_hook(notes.projected).remove)
        stack.enter_context(watching(model, notes.see))
        yield


@contextmanager
def _learning(model: nn.Module) -> Iterator[None]:
    """With every parameter asking for gradients, so that frozen layers are seen too."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


@cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of what forward takes, in order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
