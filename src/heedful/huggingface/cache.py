"""Cache: what a swapped model remembers while it writes; layers whose mechanism reads on from a State keep that instead of all keys."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from ..attention import DEMANDS, Capture, Mechanism, Unsupported
from ..state import State
from .seam import CROSS, NAME
from .swap import swapped


def cache(model: nn.Module) -> StateCache | CrossStateCache:
    """A fresh cache for `generate` or a forward pass: the layers that were given a mechanism with "state" keep its state, the others their keys.

    Pass it as `past_key_values`; a chat goes on with the same cache. A state cannot be undone, so assisted decoding and `crop` are
    refused, and it keeps no gradient. Watchers see the first call of such a layer; later ones have no keys to show.

    >>> from heedful.huggingface import swap
    >>> from heedful.mechanisms import Local
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9))
    >>> swap(model, {"model.layers.0.self_attn": Local(window=3)})
    >>> kept = cache(model)
    >>> model.generate(torch.tensor([[1, 5, 4, 3, 7]]), past_key_values=kept, max_new_tokens=9, min_new_tokens=9).shape
    torch.Size([1, 14])
    >>> kept.get_seq_length(), kept.layers[0].state.k.shape
    (13, torch.Size([1, 2, 3, 4]))
    """
    own = StateCache(model)
    return CrossStateCache(own, DynamicCache()) if model.config.is_encoder_decoder else own  # type: ignore[union-attr]


class StateCache(DynamicCache):
    """transformers' own cache, some of whose layers hold states."""

    def __init__(self, model: nn.Module):
        super().__init__(config=model.config)  # type: ignore[arg-type]
        for name, mechanism in swapped(model).items():
            module = model.get_submodule(name)
            place = getattr(module, "layer_idx", None)
            if "state" in mechanism.supports and place is not None and _reads_causally(name, module):
                self.layers[place] = StateLayer(name, module, mechanism, self._window(name, place, mechanism))

    def _window(self, name: str, place: int, mechanism: Mechanism) -> int | None:
        """The sliding window of the layer that a state replaces; refused where the state would see other keys than it."""
        former = self.layers[place]
        if type(former) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise Unsupported(
                f"{name}: a state cannot replace the {type(former).__name__} of this layer; generate with use_cache=False."
            )
        window = getattr(former, "sliding_window", None)
        if window is not None and (mechanism.reach is None or mechanism.reach > window):
            raise Unsupported(
                f"{name}: the state of {mechanism!r} cannot honour the model's own window of {window} tokens; "
                f"use Local(window={window}) or less, without sinks, or generate with use_cache=False."
            )
        return window

    @property
    def bytes(self) -> int:
        """How much memory the states, keys and values take now."""
        return _bytes(self)


class CrossStateCache(EncoderDecoderCache):
    """The same for encoder-decoders: the decoder's own attention may hold states, cross attention keeps its keys."""

    @property
    def bytes(self) -> int:
        return _bytes(self.self_attention_cache) + _bytes(self.cross_attention_cache)


def _bytes(held: Cache) -> int:
    return sum(layer.bytes if isinstance(layer, StateLayer) else _size(vars(layer)) for layer in held.layers)


def _size(value: Any) -> int:
    """Of a tensor, or of those in a bundle."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value.values())) if isinstance(value, dict) else 0


def _reads_causally(name: str, module: nn.Module) -> bool:
    """Not an encoder's attention nor one from a decoder to it."""
    return getattr(module, "is_causal", True) and not (CROSS.search(name) or CROSS.search(type(module).__name__))


class StateLayer(CacheLayerMixin):
    """One layer's state. `update` hands the new keys on, marked, and the seam gives them back with their queries to `answer`."""

    is_croppable = False
    supports_early_init = False

    def __init__(self, name: str, module: nn.Module, mechanism: Mechanism, sliding_window: int | None):
        super().__init__()
        self.name, self.module, self.mechanism = name, ref(module), ref(mechanism)
        self.is_sliding, self.sliding_window = sliding_window is not None, sliding_window
        self.state: State | None = None
        self.waiting, self.cumulative_length = False, 0
        self.real: Tensor | None = None  # how many real tokens each text has

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        module, mechanism = self.module(), self.mechanism()
        if module is None or mechanism is None or module._modules.get(NAME) is not mechanism:
            raise ValueError(
                f"{self.name}: its mechanism is not the one this cache was made for; make a new cache(model) after each swap."
            )
        if self.waiting:
            raise ValueError(
                f"{self.name}: the tokens given before never came to its mechanism: the call failed, or the cache was made for another "
                "model; make a new cache(model) for each model and after an error."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.waiting, self.cumulative_length = True, self.cumulative_length + key_states.shape[-2]
        key_states.heedful = self  # type: ignore[attr-defined]  # the seam finds the way back
        return key_states, value_states

    def answer(self, module: nn.Module, call: Capture) -> Tensor:
        """What the mechanism says to the new tokens after those in the state."""
        mechanism = self.mechanism()
        if module is not self.module() or mechanism is None:
            raise ValueError(f"{call.layer}: this cache was made for another model; make one with cache(model).")
        keys = self._new_keys(call, mechanism)
        out, self.state = mechanism.decode(call.q, call.k, call.v, self.state, keys, call.scale)
        self.waiting = False
        return out

    def _new_keys(self, call: Capture, mechanism: Mechanism) -> Tensor | None:
        """Which of the new tokens are real; refuses rules that the state cannot honour."""
        new, mask = call.q.shape[-2], call.mask
        beyond = mask.demands - {"causal", "keys"} | {n for n in ("cap", "null") if getattr(call, n) is not None}
        if mask.window is not None and mechanism.reach is not None and mechanism.reach <= mask.window and not mask.sinks:
            beyond = beyond - {"window"}
        if beyond:
            raise Unsupported(
                f"its state cannot honour {', '.join(DEMANDS[b] for b in sorted(beyond))}; generate with use_cache=False."
            )
        if new > 1 and not mask.causal:
            raise Unsupported(
                "its state reads causally, but this call's mask lets tokens see later ones; generate with use_cache=False."
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in (call.q, call.k, call.v)):
            raise Unsupported("a state keeps no gradient; call the model inside torch.no_grad(), or train it with use_cache=False.")
        keys = mask.keys if mask.keys is None else mask.keys.expand(len(call.q), -1)
        self._count(keys, new, len(call.q), call.q.device)
        return None if keys is None or bool(keys[:, -new:].all()) else keys[:, -new:]

    def _count(self, keys: Tensor | None, new: int, batch: int, device: torch.device) -> None:
        """Refuse a mask that hides or shows other tokens of the past than before; compared where several tokens come at once."""
        fresh = torch.full((batch,), new, device=device) if keys is None else keys[:, -new:].sum(-1)
        former = torch.zeros_like(fresh) if self.real is None else self.real
        if self.state is not None and new > 1 and not self.is_sliding:
            past = self.cumulative_length - new
            said = torch.full_like(fresh, past) if keys is None else keys[:, :-new].sum(-1)
            if not torch.equal(said, former):
                raise ValueError(
                    f"attention_mask shows {said.tolist()} real tokens before the new ones, but the cache has read {former.tolist()}; "
                    "give the mask of all tokens so far, padding included."
                )
        self.real = former + fresh

    @property
    def bytes(self) -> int:
        return 0 if self.state is None else self.state.bytes

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if all keys were here; in a layer with a sliding window, as if those of the window were, as its neighbours say."""
        if self.sliding_window is None:
            return self.cumulative_length + query_length, 0
        kept = min(self.cumulative_length, self.sliding_window - 1)
        return kept + query_length, self.cumulative_length - kept

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.real, self.waiting, self.cumulative_length, self.is_initialized = None, None, False, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None and self.real is not None:
            self.state, self.real = self.state.select(beam_idx), self.real[beam_idx.to(self.real.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None and self.real is not None:
            self.state, self.real = self.state.repeat(repeats), self.real.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.real is not None:
            self.reorder_cache(torch.arange(len(self.real), device=self.real.device)[indices])

    def activate_past_recording(self) -> None:
        raise Unsupported(self._forward_only("assisted decoding takes rejected tokens back"))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.cumulative_length:
            raise Unsupported(self._forward_only(f"crop({tokens_to_remove}) takes tokens back"))

    def _forward_only(self, what: str) -> str:
        mechanism = type(self.mechanism()).__name__
        return f"{self.name}: {what}, which the state of {mechanism} cannot: what it has read is summed up. Generate without this cache."
