"""Layer: an attention module whose q.k size and v size differ freely, by layer and by head, in the place of a family's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .families import Projections
from .turning import Turning

SEAM = "heedful"  # marks keys whose cache holds a state


@dataclass(frozen=True)
class Sizes:
    """How large the heads of a layer are: dims of q.k and of v by key head, and which frequency pairs those of a rotary layer turn by.

    >>> Sizes(4, (16, 8), (8, 8)).queries
    (16, 16, 8, 8)
    """

    heads: int
    qk: tuple[int, ...]
    v: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...] | None = None  # come first among a head's dims: their first halves, then their second

    @property
    def queries(self) -> tuple[int, ...]:
        """Dims of each query head."""
        return self._spread(self.qk)

    @property
    def values(self) -> tuple[int, ...]:
        """Dims of the output of each query head."""
        return self._spread(self.v)

    @property
    def query_pairs(self) -> tuple[tuple[int, ...], ...] | None:
        return None if self.pairs is None else self._spread(self.pairs)

    def _spread(self, each: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(one for one in each for _ in range(self.heads // len(each)))


class Ragged(nn.Module):
    """Heads of different sizes, laid side by side without gaps, and how they become heads of one size with zeros behind.

    >>> Ragged((2, 1)).padded(torch.arange(1, 4.0).view(1, 1, 3))
    tensor([[[[1., 2.]], [[3., 0.]]]])
    """

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.count, self.largest, self.even = len(sizes), max(sizes), len(set(sizes)) == 1
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        grid = [[starts[h] + i if i < size else sum(sizes) for i in range(self.largest)] for h, size in enumerate(sizes)]
        self.spread: Tensor
        self.dense: Tensor
        self.register_buffer("spread", torch.tensor(grid).flatten(), persistent=False)
        full = [h * self.largest + i for h, size in enumerate(sizes) for i in range(size)]
        self.register_buffer("dense", torch.tensor(full), persistent=False)

    def kept(self, x: Tensor) -> Tensor:
        """(batch, tokens, all dims) as a cache keeps it: (batch, heads, tokens, dim), or one head of all dims where sizes differ."""
        return x.unflatten(-1, (self.count if self.even else 1, -1)).transpose(1, 2)

    def read(self, x: Tensor) -> Tensor:
        """What `kept` gave as (batch, heads, tokens, dim)."""
        return x if self.even else self.padded(x[:, 0])

    def padded(self, x: Tensor) -> Tensor:
        if self.even:
            return self.kept(x)
        return F.pad(x, (0, 1)).index_select(-1, self.spread).unflatten(-1, (self.count, -1)).transpose(1, 2)

    def joined(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, dim) side by side again, without the zeros."""
        flat = x.flatten(-2)
        return flat if self.even else flat.index_select(-1, self.dense)


class Resized(nn.Module):
    """Attention with heads of free sizes; `adopt` turns a family's own module into one, which then belongs to both classes.

    It keeps what the module had (dropout, hooks, position bias, a swapped mechanism) and its arguments, and calls the attention
    interface of transformers. Its cache holds the heads' dims alone, however they differ.
    """

    native: type[nn.Module]
    places: Projections
    names: tuple[str, str, str]  # of the modules that make q, k and v
    sizes: Sizes
    first: Sizes  # before any change
    ragged: Any  # by q, k, v and o
    turning: Any  # by q and k
    config: Any
    scaling: float
    layer_idx: Any

    def fit(self, sizes: Sizes) -> None:
        """Read the projections as heads of these sizes from now on."""
        self.sizes, self.qk_head_dim = sizes, max(sizes.qk)
        for word in ("num_heads", "num_attention_heads", "n_heads"):
            if word in self.__dict__:
                setattr(self, word, sizes.heads)
        ragged = {"q": sizes.queries, "k": sizes.qk, "v": sizes.v, "o": sizes.values}
        self.ragged = nn.ModuleDict({name: Ragged(each) for name, each in ragged.items()})
        if sizes.pairs is not None and sizes.query_pairs is not None:
            turning = {"q": Turning(sizes.queries, sizes.query_pairs), "k": Turning(sizes.qk, sizes.pairs)}
            self.turning = nn.ModuleDict(turning)
        device = getattr(self, self.names[0]).weight.device
        for part in (self.ragged, *([self.turning] if sizes.pairs is not None else [])):
            part.to(device)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What the family's own module gives for the same arguments."""
        given, places = {**dict(zip(_words(self.native), args, strict=False)), **kwargs}, self.places
        mask, past = given.pop(places.mask, None), given.pop(places.cache, None)
        turn = given.pop("position_embeddings", None)
        other = given.pop(places.other, None) if places.other else None
        if places.other_mask is not None:
            theirs = given.pop(places.other_mask, None)
            mask = mask if other is None else theirs
        seen = past.get_seq_length(self.layer_idx) if places.biased and past is not None else 0  # before it grows
        q = self.ragged["q"].padded(self._turned("q", self._made(0, hidden_states), turn))
        k, v = self._keys(hidden_states if other is None else other, other is not None, past, turn)
        if places.biased:
            given["position_bias"] = self._bias(given.get("position_bias"), q, k, seen)
        if places.window:
            given["sliding_window"] = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        out, weights = attend(self, q, k, v, mask, dropout=self._dropout, scaling=self.scaling, **given)
        out = self._finished(self.ragged["o"].joined(out))
        return (out, given["position_bias"], weights) if places.biased else (out, weights)

    def _made(self, which: int, states: Tensor) -> Tensor:
        return getattr(self, self.names[which])(states)

    def _turned(self, which: str, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        return x if turn is None or self.sizes.pairs is None else self.turning[which](x, *turn)

    def _keys(self, states: Tensor, across: bool, past: Any, turn: Any) -> tuple[Tensor, Tensor]:
        """Keys and values, those of the cache with them; those of other tokens are made once."""
        both = isinstance(past, EncoderDecoderCache)
        held = past if not both else past.cross_attention_cache if across else past.self_attention_cache
        if both and across and past.is_updated.get(self.layer_idx):
            k, v = held.layers[self.layer_idx].keys, held.layers[self.layer_idx].values
        else:
            k = self.ragged["k"].kept(self._turned("k", self._made(1, states), turn))
            v = self.ragged["v"].kept(self._made(2, states))
            if held is not None:
                k, v = held.update(k, v, self.layer_idx)
                if both and across:
                    past.is_updated[self.layer_idx] = True
        state, k, v = getattr(k, SEAM, None), self.ragged["k"].read(k), self.ragged["v"].read(v)
        if state is not None:
            setattr(k, SEAM, state)
        return k, v

    def _bias(self, given: Tensor | None, q: Tensor, k: Tensor, seen: int) -> Tensor:
        """T5's bias: as the layers before handed it on, else by distance in the first layer and none elsewhere."""
        if given is not None:
            return given
        if getattr(self, "has_relative_attention_bias", False):
            return self.compute_bias(q.shape[2], k.shape[2], device=q.device, past_seen_tokens=seen)  # type: ignore[operator]
        return q.new_zeros(1, q.shape[1], q.shape[2], k.shape[2])

    def _finished(self, out: Tensor) -> Tensor:
        if self.places.o.module.startswith(".."):  # the module beside this one does it
            return out
        out = getattr(self, self.places.o.module)(out.contiguous())
        return self.resid_dropout(out) if hasattr(self, "resid_dropout") else out  # type: ignore[operator]

    @property
    def _dropout(self) -> float:
        found = (getattr(self, name, None) for name in ("attn_dropout", "attention_dropout", "dropout"))
        kept = next((x for x in found if x is not None), 0.0)
        return (kept.p if isinstance(kept, nn.Dropout) else float(kept)) if self.training else 0.0

    @cached_property
    def _eager(self) -> Any:
        return sys.modules[self.native.__module__].eager_attention_forward  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        return f"qk={_short(self.sizes.qk)}, v={_short(self.sizes.v)}"

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class is made as it is needed
        state = {name: value for name, value in self.__dict__.items() if name != "_eager"}
        return _blank, (self.native,), state


@cache
def kind_of(native: type[nn.Module]) -> type[nn.Module]:
    """The class of a family's module with free sizes."""
    return type(f"Resized{native.__name__}", (Resized, native), {"native": native})


def _blank(native: type[nn.Module]) -> nn.Module:
    kind = kind_of(native)
    return kind.__new__(kind)


@cache
def _words(native: type[nn.Module]) -> tuple[str, ...]:
    """The names of a forward's arguments after the states."""
    code = native.forward.__code__
    return code.co_varnames[2 : code.co_argcount]


def _short(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else ",".join(map(str, sizes))
