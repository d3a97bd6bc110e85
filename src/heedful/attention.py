"""What one attention call is: its Mask, its Capture (the call as it happened) and the Mechanism that answers it."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mask import Mask, Rule
from .ops.hop import EVERYTHING, check_shapes
from .ops.profile import Columns, Logits, Rows, profile
from .state import State

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = ["Capture", "Mask", "Mechanism", "Rule", "State", "Unsupported"]


class Unsupported(ValueError):
    """A mechanism was asked for something it cannot honour."""


class Mechanism(nn.Module):
    """A way of attending: a dataclass whose fields are its settings, with `attend` as its formula.

    To write one, decorate a subclass with `@dataclass(eq=False)`, name in `supports` what it honours and give `attend`; give `prepare`
    too where it owns random or learned tensors. Called as mechanism(q, k, v, mask) with q (batch, heads, queries, dim) and k, v
    (batch, key heads, keys, dim): shapes are checked, shared key heads spread, and what it does not declare refused.
    """

    # of Mask's rules, and "cross", "cap", "null", "shared" (keys come unspread), "state" (`advance` is there)
    supports: ClassVar[frozenset[str]] = frozenset()
    instead: ClassVar[str] = "Softmax()"  # what the refusal names
    rival: ClassVar[bool] = True  # whether a bench sets it beside exact attention unasked
    keeps_all: ClassVar[bool] = False  # whether its state keeps every key, and so grows with the text

    def __new__(cls, *args: Any, **kwargs: Any) -> Mechanism:
        self = super().__new__(cls)
        nn.Module.__init__(self)  # before the dataclass sets its fields
        return self

    def attend(
        self,
        q: Float[Tensor, "batch heads queries dim"],
        k: Float[Tensor, "batch heads keys dim"],
        v: Float[Tensor, "batch heads keys width"],
        mask: Mask,
        scale: float,
    ) -> Float[Tensor, "batch heads queries width"]:
        """The formula."""
        raise NotImplementedError

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, keys: Tensor | None, scale: float
    ) -> tuple[Tensor, State]:
        """The formula of `decode`; `keys` is False at padding among the new tokens."""
        raise NotImplementedError

    @property
    def reach(self) -> int | None:
        """How many of the latest tokens a query may look at, its own included; None where nothing bounds them."""
        return None

    def prepare(self, heads: int, head_dim: int) -> None:
        """Make the tensors that the settings call for, as parameters or buffers; called again with the same sizes it changes nothing."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, scale: float | None = None, **extra: Any
    ) -> Tensor:
        """Attend; `scale` is 1/sqrt(dim) unless given, `extra` holds a soft cap `cap` and null logits `null` where the model has them."""
        check_shapes(q, k, v)
        mask = _mask(mask)
        mask.check(q.shape[-2], k.shape[-2], q.shape[0])
        extra = {name: value for name, value in extra.items() if value is not None}
        if extra.keys() - {"cap", "null"}:
            raise TypeError(f"attention takes cap and null beside its mask and scale, not {', '.join(sorted(extra))}.")
        across = mask.cross or q.shape[-2] != k.shape[-2]
        self.refuse(mask.demands | extra.keys() | ({"cross"} if across else set()))
        if min(q.numel(), v.numel()) == 0:
            return v.new_zeros(*q.shape[:3], v.shape[-1]) + sum(t[..., :0].sum() for t in (q, k, v))  # still of the graph
        early = min(-mask.offset, q.shape[-2])  # queries before the first key
        if early > 0 and mask.demands <= {"causal", "keys"} and mask.causal:
            out = self(q[:, :, early:], k, v, dataclasses.replace(mask, offset=mask.offset + early), scale, **extra)
            return F.pad(out, (0, 0, early, 0))
        k, v = self._spread(q, k, v)
        with _own_precision(q):
            self._prepared(q)
            return self.attend(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, **extra)

    @torch.no_grad()
    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, keys: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, State]:
        """Attend causally with tokens that follow those in `state` (None at the start), and the state that holds them too.

        `keys` (batch, new tokens) is False at padding. Token by token or many at once, the outputs are those of one causal call.
        """
        check_shapes(q, k, v)
        self.refuse({"causal", "state"} | ({"keys"} if keys is not None else set()))
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(f"decoding needs one key for each new query; got {q.shape[-2]} queries and {k.shape[-2]} keys.")
        if keys is not None:
            Mask(keys=keys).check(q.shape[-2], k.shape[-2], q.shape[0])
            keys = keys.expand(q.shape[0], -1)
        k, v = self._spread(q, k, v)
        with _own_precision(q):
            self._prepared(q)
            return self.advance(q, k, v, state, keys, q.shape[-1] ** -0.5 if scale is None else scale)

    def _prepared(self, q: Tensor) -> None:
        """Have the tensors made, so that they can learn later whatever the mode is now."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self.prepare(q.shape[1], q.shape[-1])

    def _spread(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Shared key heads as one for each query head, unless the formula takes them as they are."""
        if q.shape[1] == k.shape[1] or "shared" in self.supports:
            return k, v
        shared = q.shape[1] // k.shape[1]
        return k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)

    def refuse(self, demands: frozenset[str] | set[str]) -> None:
        """Raise `Unsupported` where a call demands more than is declared."""
        beyond = sorted(demands - self.supports)
        if beyond:
            instead = STATEFUL if "state" in beyond else self.instead
            what = ", ".join(DEMANDS[b] for b in beyond)
            raise Unsupported(f"{type(self).__name__} cannot honour {what}; use {instead} for this call.")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields as plain data.

        >>> from heedful.mechanisms import Softmax
        >>> Softmax(beta=2.0).settings
        {'beta': 2.0}
        """
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}  # type: ignore[arg-type]


def _mask(given: Any) -> Mask:
    if given is None:
        return EVERYTHING
    if not isinstance(given, Mask):
        raise TypeError(
            f"a mask is a heedful.Mask, not a {type(given).__name__}; say Mask(causal=True), Mask(keys=...) or Mask(bias=...)."
        )
    return given


def _own_precision(q: Tensor) -> Any:
    """Formulas choose their precision by themselves, so autocast is off inside."""
    kind = q.device.type
    return torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) else nullcontext()


STATEFUL = "Local()"  # decodes by a state under any causal mask
DEMANDS = {
    "causal": "a causal mask",
    "keys": "key padding",
    "window": "a sliding window",
    "sinks": "sink tokens",
    "segments": "packed texts",
    "bias": "an additive bias on the logits",
    "rule": "a mask rule of the model's own",
    "cross": "keys of other tokens than the queries",
    "cap": "a soft cap on the logits",
    "null": "null logits that take mass to no key",
    "state": "decoding from a state",
}


@dataclass(frozen=True, eq=False)
class Capture:
    """One attention call as it happened; its profiles are computed once, when first asked for, without an L x L matrix.

    `sample` names the query rows that the profiles look at (all where None), `real` the queries that are tokens rather than padding.
    """

    layer: str
    q: Float[Tensor, "batch heads queries dim"]
    k: Float[Tensor, "batch key_heads keys dim"]
    v: Float[Tensor, "batch key_heads keys width"]
    mask: Mask = EVERYTHING
    scale: float = 1.0
    cap: float | None = None
    null: Float[Tensor, " heads"] | None = None  # a logit per head that takes mass to no key (gpt-oss)
    out: Float[Tensor, "batch heads queries width"] | None = None
    sample: Int[Tensor, " rows"] | None = None
    real: Bool[Tensor, "batch queries"] | None = None

    @cached_property
    def _profile(self) -> tuple[Rows, Columns]:
        with torch.no_grad():
            return profile(self.q, self.logits, self.sample, self.real, self.v)

    @cached_property
    def logits(self) -> Logits:
        """What makes the logits, for formulas that go over tiles of queries."""
        high = torch.promote_types(self.k.dtype, torch.float32)
        return Logits(self.k.to(high), self.mask, self.scale, self.cap, self.null)

    @property
    def rows(self) -> Rows:
        """Per query: lse, entropy, peak, squared mass, distance, sink, nearby mass."""
        return self._profile[0]

    @property
    def columns(self) -> Columns:
        """Per key: the mass and squared mass that the sampled queries give it."""
        return self._profile[1]

    @property
    def tokens(self) -> Int[Tensor, " batch"]:
        """How many queries of each batch entry are real."""
        if self.real is None:
            return torch.full(self.q.shape[:1], self.q.shape[-2], device=self.q.device)
        return self.real.sum(-1).expand(self.q.shape[0])

    @cached_property
    def stands_for(self) -> Float[Tensor, " batch"]:
        """How many queries the valid sampled rows of each batch entry stand for."""
        if self.sample is None:
            return self.rows.valid.sum(-1).double()
        looked = self.tokens.clamp_max(len(self.sample)) if self.real is None else self.real[:, self.sample].sum(-1)
        return self.tokens * self.rows.valid.sum(-1).double() / looked.clamp_min(1)

    @cached_property
    def whole(self) -> Bool[Tensor, " batch"]:
        """Whether every real query of a batch entry was looked at."""
        return self.stands_for <= self.rows.valid.sum(-1)

    @property
    def sources(self) -> Int[Tensor, " batch"]:
        """How many keys of each batch entry are tokens."""
        if self.mask.keys is None:
            return torch.full(self.q.shape[:1], self.k.shape[-2], device=self.q.device)
        return self.mask.keys.sum(-1).expand(self.q.shape[0])
