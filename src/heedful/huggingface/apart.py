"""Taking apart: a model reads one batch, and its blocks' matrices are confirmed against what it computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Capture
from ..exact.block import Block, Norm
from .blocks import Undecomposable, blocks, final_module, final_norm, norm_modules, norm_of
from .seam import watching

TOKENS = 16  # of each text, at which blocks are confirmed


@dataclass(frozen=True, eq=False)
class Apart:
    """A model in pieces, and one batch on its way through them.

    `states[i]` (batch, tokens, dim) is what block i reads, the last what the last block gives; `calls[i]` is its attention call with
    the real q, k, v and out (rotary embedding done).
    """

    blocks: tuple[Block, ...]
    calls: tuple[Capture, ...]
    states: tuple[Tensor, ...]
    final: Norm | None

    @property
    def output(self) -> Tensor:
        """The model's last hidden state."""
        return self.states[-1] if self.final is None else self.final(self.states[-1])

    @property
    def real(self) -> Tensor | None:
        """Which tokens are no padding, (batch, tokens); None where all are."""
        return self.calls[0].real


def take_apart(model: nn.Module, run: Callable[[], Any]) -> Apart:
    """The pieces of a model and what it computes from one batch, which `run` lets it read; each block is confirmed numerically.

    A model in float64 is read without the detour of its RMS norms through float32.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, intermediate_size=8, vocab_size=9)).eval()
    >>> apart = take_apart(model, lambda: model(torch.arange(5)[None]))
    >>> len(apart.blocks), len(apart.states), apart.calls[0].q.shape
    (3, 4, torch.Size([1, 2, 5, 4]))
    """
    made, final = blocks(model), final_norm(model)
    if model.training:
        raise ValueError(
            f"{type(model).__name__} is in training mode, where dropout changes what it computes; call model.eval() first."
        )
    calls, states, last = _read(model, made, run)
    apart = Apart(made, calls, states, final)
    for i, block in enumerate(made):
        _confirm(type(model).__name__, block, calls[i], states[i], states[i + 1])
    if last is not None and final is not None:
        _same(type(model).__name__, "the final norm", "output", final(states[-1]), last)
    return apart


def _read(
    model: nn.Module, made: tuple[Block, ...], run: Callable[[], Any]
) -> tuple[tuple[Capture, ...], tuple[Tensor, ...], Tensor | None]:
    """The calls and states of one run, and what the final norm gave."""
    calls: dict[str, list[Capture]] = {}
    given: dict[str, list[tuple[Tensor, Tensor]]] = {}
    last: list[Tensor] = []
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(full_precision(model))
        stack.enter_context(watching(model, lambda call: calls.setdefault(call.layer, []).append(call)))
        for block in made:
            hook = model.get_submodule(block.name).register_forward_hook(
                partial(_keep, given.setdefault(block.name, [])), with_kwargs=True
            )
            stack.callback(hook.remove)
        norm = final_module(model)
        if norm is not None:
            stack.callback(norm.register_forward_hook(lambda *seen: last.append(seen[-1])).remove)
        run()
    for block in made:
        seen = len(given[block.name]), len(calls.get(block.attention, []))
        if seen != (1, 1):
            raise Undecomposable(
                f"{block.name} of {type(model).__name__} ran {seen[0]} times and attended {seen[1]} times in the run; each must once: "
                "read one batch, without generating."
            )
    states = [given[block.name][0] for block in made]
    found = (*(before for before, _ in states), states[-1][1])
    return tuple(_detached(calls[block.attention][0]) for block in made), found, last[-1] if last else None


def _keep(kept: list[tuple[Tensor, Tensor]], module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    given = args[0] if args else kwargs["hidden_states"]
    kept.append((given.detach(), (output[0] if isinstance(output, tuple) else output).detach()))


def _detached(call: Capture) -> Capture:
    parts: dict[str, Any] = {name: x.detach() for name in ("q", "k", "v", "out") if (x := getattr(call, name)) is not None}
    return replace(call, **parts)


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Inside this block a float64 model's RMS norms, which round to float32, are computed in float64; others stay as they are."""
    with ExitStack() as stack:
        for name, module in norm_modules(model).items():
            norm = norm_of(module, name)
            if not isinstance(module, nn.LayerNorm) and norm.weight.dtype == torch.float64:
                hook = module.register_forward_hook(lambda module, args, output, norm=norm: norm(args[0]))
                stack.callback(hook.remove)
        yield


def _confirm(model: str, block: Block, call: Capture, before: Tensor, after: Tensor) -> None:
    """Refuse a block whose matrices do not give the call and the output that were seen, at some tokens of all texts."""
    for what, x in (("reads", before), ("gives", after)):
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"{block.name} of {model} {what} NaN or infinite states; look at the weights and inputs, and load a half-precision model "
                "with dtype=torch.float32."
            )
    if call.null is not None:
        raise Undecomposable(
            f"{block.attention} of {model} gives mass to no key, so its weights do not sum to 1; use another model."
        )
    assert call.out is not None
    some = torch.arange(0, before.shape[1], max(1, before.shape[1] // TOKENS), device=before.device)
    x = before[:, some]
    for what, own, seen in zip("qkv", block.heads.project(block.attended(x)), (call.q, call.k, call.v), strict=True):
        seen = _spread(seen, own.shape[1])[:, :, some] if seen.shape[2] == before.shape[1] else seen
        if block.rotary and what != "v":  # turning keeps lengths, to float32, in which the angles are
            own, seen = own.norm(dim=-1).float(), seen.norm(dim=-1).float()
        _same(model, block.attention, what, own, seen)
    _same(model, block.name, "output", block.finish(block.middle(x, call.out[:, :, some])), after[:, some])


def _spread(seen: Tensor, heads: int) -> Tensor:
    """Shared key heads as one for each query head."""
    return seen.repeat_interleave(heads // seen.shape[1], 1) if heads % seen.shape[1] == 0 else seen


def _same(model: str, where: str, what: str, own: Tensor, seen: Tensor) -> None:
    if own.shape != seen.shape:
        raise Undecomposable(
            f"{where} of {model} has a {what} of {tuple(seen.shape)} where its matrices give {tuple(own.shape)}; {ADVICE}"
        )
    high = torch.promote_types(seen.dtype, torch.float32)
    error = float((own.to(high) - seen.to(high)).norm() / seen.to(high).norm().clamp_min(1e-30))
    allowed = 10 * torch.finfo(seen.dtype).eps ** 0.75
    if not error <= allowed:
        raise Undecomposable(f"{where} of {model} has another {what} than its matrices give (relative error {error:.1e}); {ADVICE}")


ADVICE = "it computes more than its family's block: use the family's plain model, without adapters, scaled residuals or changed attention."
