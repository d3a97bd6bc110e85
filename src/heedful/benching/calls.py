"""Calls: captures cut to a length or drawn out to it, and what a mechanism answers to them against exact attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention import DEMANDS, Capture, Mask, Mechanism
from ..mechanisms import Softmax
from .budget import Budget, as_bytes

OWN = frozenset({"bias", "rule"})  # rules of the model's own, known only for the tokens that it read


def extra(capture: Capture) -> dict[str, Any]:
    """The soft cap and null logits of a call, where it has them."""
    return {name: value for name in ("cap", "null") if (value := getattr(capture, name)) is not None}


def demands(capture: Capture) -> frozenset[str]:
    """What a mechanism must honour to answer a call."""
    cross = {"cross"} if capture.q.shape[-2] != capture.k.shape[-2] else set()
    return capture.mask.demands | extra(capture).keys() | cross


def size(capture: Capture) -> int:
    """The bytes of its tensors."""
    return sum(t.numel() * t.element_size() for t in (capture.q, capture.k, capture.v))


def prefix(capture: Capture, length: int) -> Capture:
    """The call over its first tokens only.

    >>> q = torch.randn(1, 2, 9, 4)
    >>> prefix(Capture("layer", q, q, q, Mask(causal=True)), 5).k.shape
    torch.Size([1, 2, 5, 4])
    """
    if length >= capture.q.shape[-2]:
        return capture
    mask, cut = capture.mask, {}
    for name in ("keys", "segments"):
        if (given := getattr(mask, name)) is not None:
            cut[name] = given[:, :length]
    if mask.bias is not None:
        cut["bias"] = mask.bias[..., :length, :length]
    short = {name: getattr(capture, name)[:, :, :length] for name in ("q", "k", "v")}
    real = None if capture.real is None else capture.real[:, :length]
    return dataclasses.replace(capture, **short, mask=dataclasses.replace(mask, **cut), out=None, real=real)


@dataclass
class Source:
    """One layer's captures, as calls of any length for timing: one text of it where there is one so long, else its rows drawn again."""

    captures: Sequence[Capture]
    seed: int = 0
    tokens: int = field(init=False)

    def __post_init__(self):
        self.tokens = max(c.q.shape[-2] for c in self.captures)

    @property
    def first(self) -> Capture:
        return max(self.captures, key=lambda c: c.q.shape[-2])

    def refusal(self, length: int, budget: Budget) -> str | None:
        """Why there is no call of that length; None where there is."""
        own = sorted(self.first.mask.demands & OWN)
        if length > self.tokens and own:
            return f"{' and '.join(DEMANDS[name] for name in own)} is known for {self.tokens} tokens only"
        needed = size(self.first) / len(self.first.q) / self.tokens * length
        return f"q, k and v alone would take {as_bytes(needed)}" if needed > budget.room / 4 else None

    def call(self, length: int) -> Capture:
        """One batch entry of that length, ready for gradients: real tokens in their order, or drawn with replacement beyond the text."""
        short = _entry(prefix(self.first, length), 0) if length <= self.tokens else self._drawn(length)
        live = {name: getattr(short, name).detach().clone().requires_grad_() for name in ("q", "k", "v")}
        return dataclasses.replace(short, **live)

    def _drawn(self, length: int) -> Capture:
        rows = [self._rows(name) for name in ("q", "k", "v")]  # (1, heads, all tokens, dim)
        drawn = torch.randint(rows[0].shape[-2], (length,), generator=torch.Generator().manual_seed(self.seed), device="cpu")
        q, k, v = (t[:, :, drawn.to(t.device)] for t in rows)
        mask = self.first.mask
        kept = Mask(causal=mask.causal, window=mask.window, sinks=mask.sinks)
        return dataclasses.replace(self.first, q=q, k=k, v=v, mask=kept, out=None, real=None, sample=None)

    def _rows(self, name: str) -> Tensor:
        """The real tokens of all captures, one after the other."""
        found = []
        for capture in self.captures:
            for entry in range(len(capture.q)):
                rows = getattr(capture, name)[entry]
                found.append(rows if capture.mask.keys is None else rows[:, capture.mask.keys[entry % len(capture.mask.keys)]])
        return torch.cat(found, 1)[None]


def _entry(capture: Capture, entry: int) -> Capture:
    own = {name: getattr(capture, name)[entry : entry + 1] for name in ("q", "k", "v")}
    return dataclasses.replace(capture, **own, mask=capture.mask.entry(entry), out=None, real=None)


def answer(mechanism: Mechanism, call: Capture) -> Tensor:
    """What a mechanism gives for a call."""
    return mechanism(call.q, call.k, call.v, call.mask, call.scale, **extra(call))


def forward(mechanism: Mechanism, call: Capture) -> Callable[[], Any]:
    """The call without gradients, to be timed."""

    @torch.no_grad()
    def case() -> Tensor:
        return answer(mechanism, call)

    return case


def training(mechanism: Mechanism, call: Capture) -> Callable[[], Any]:
    """The call with the gradients of q, k, v and of what the mechanism learns, to be timed."""

    def case() -> Any:
        with torch.enable_grad():
            out = answer(mechanism, call)
            wanted = [call.q, call.k, call.v, *(p for p in mechanism.parameters() if p.requires_grad)]
            return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return case


CASES = {"forward": forward, "training": training}


class Distance:
    """The distance of one mechanism's answers from exact attention's, added up over calls, per head."""

    def __init__(self):
        self.off: Tensor | float = 0.0
        self.whole: Tensor | float = 0.0

    def add(self, found: Tensor, exact: Tensor, call: Capture) -> None:
        real = call.real if call.real is not None else call.mask.real(call.q.shape[-2])
        weight = 1.0 if real is None else real[:, None, :, None].to(exact)
        self.off = self.off + ((found.to(exact) - exact).square() * weight).sum((0, 2, 3)).double()
        self.whole = self.whole + (exact.square() * weight).sum((0, 2, 3)).double()

    def relative(self) -> list[float | None]:
        """A value per head; None where it is not finite."""
        ratio = (torch.as_tensor(self.off) / torch.as_tensor(self.whole)).sqrt()
        return [x if torch.isfinite(torch.tensor(x)) else None for x in ratio.tolist()]


def exactly(call: Capture) -> Tensor:
    """Exact attention, in float32 at least."""
    high = torch.promote_types(call.q.dtype, torch.float32)
    own = {name: getattr(call, name).to(high) for name in ("q", "k", "v")}
    return answer(Softmax(), dataclasses.replace(call, **own))
