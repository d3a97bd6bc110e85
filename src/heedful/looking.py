"""Looking: what a scan does with each attention call and each block's states while a model reads."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .about import Layer
from .attention import Capture
from .huggingface.stacks import stack_of, stacks
from .statistic import Statistic
from .statistics import Residual


class Look:
    """Adds up statistics of the calls that it is shown; a call is forgotten once it is counted.

    The rows it samples depend on the seed and on the texts alone, so the same texts give the same findings in any order.
    """

    def __init__(self, statistics: Sequence[type[Statistic]], rows: int | None, seed: int):
        self.statistics, self.rows, self.seed = tuple(statistics), rows, seed
        self.layers: dict[str, dict[str, Statistic]] = {}
        self.depths: dict[str, Statistic] = {}
        self.shapes: dict[str, Layer] = {}
        self._real: dict[tuple[str, int], Tensor | None] = {}  # by stack and length, which tokens are real
        self._mark = b""

    def begin(self, inputs: dict[str, Any]) -> None:
        """A new batch is about to be read."""
        self._real = {}
        tensors = [x for _, x in sorted(inputs.items()) if isinstance(x, Tensor)]
        self._mark = hashlib.sha256(
            b"".join(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)
        ).digest()

    @torch.no_grad()
    def call(self, capture: Capture) -> None:
        """Count one attention call."""
        queries = (stack_of(capture.layer), capture.q.shape[-2])
        cross = capture.mask.cross or (capture.q.shape[-2] != capture.k.shape[-2] and capture.mask.offset == 0)
        if capture.real is None and queries in self._real:  # cross attention: its queries are those of the block's own attention
            capture = dataclasses.replace(capture, real=self._real[queries])
        self._real.setdefault(queries, capture.real)
        capture = dataclasses.replace(capture, sample=self._sample(capture))
        _add(self.layers.setdefault(capture.layer, {}), {s.__name__: s.of(capture) for s in self.statistics})
        shape = Layer(capture.q.shape[1], capture.k.shape[1], capture.q.shape[-1], capture.v.shape[-1], _rules(capture), cross)
        self.shapes[capture.layer] = self.shapes[capture.layer] | shape if capture.layer in self.shapes else shape

    @torch.no_grad()
    def states(self, depth: str, states: Tensor) -> None:
        """Count the hidden states (batch, tokens, dim) at one depth."""
        stack = depth.rpartition(" ")[0]
        _add(self.depths, {depth: Residual.of_states(states, self._real.get((stack, states.shape[1])))})

    def _sample(self, capture: Capture) -> Tensor | None:
        queries = capture.q.shape[-2]
        if self.rows is None or queries <= self.rows:
            return None
        seed = hashlib.sha256(f"{self.seed} {queries} ".encode() + self._mark).digest()
        chosen = torch.randperm(queries, generator=torch.Generator().manual_seed(int.from_bytes(seed[:7], "big")), device="cpu")[
            : self.rows
        ]
        return chosen.sort().values.to(capture.q.device)


def _add(total: dict[str, Statistic], part: dict[str, Statistic]) -> None:
    for name, statistic in part.items():
        total[name] = total[name] + statistic if name in total else statistic


def _rules(capture: Capture) -> tuple[str, ...]:
    more = {"cap": capture.cap, "null": capture.null}
    return tuple(sorted(capture.mask.demands | {name for name, value in more.items() if value is not None}))


@contextmanager
def watching_states(model: nn.Module, layers: Sequence[str], look: Any) -> Iterator[None]:
    """Show `look` what goes into each stack of blocks and what comes out of each block.

    A block that reads what was just made stands one deeper, so one that is called again and again (ALBERT) is many.
    """
    handles, last = [], {}
    for stack, names in stacks(layers).items():
        for depth, name in enumerate(names):
            handles.append(model.get_submodule(name).register_forward_hook(_after(look, stack, depth, last), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _after(look: Look, stack: str, place: int, last: dict[str, tuple[Tensor, int]]) -> Any:
    """A hook for the block at this place; `last` holds what each stack made last, and at which depth."""

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        made = output[0] if isinstance(output, tuple) and output else output
        before, deep = last.get(stack, (None, 0))
        depth = deep if given is before and before is not None else place
        if depth == 0 and isinstance(given, Tensor) and given.ndim == 3:
            look.states(f"{stack} 0", given)
        if isinstance(made, Tensor) and made.ndim == 3:
            look.states(f"{stack} {depth + 1}", made)
            last[stack] = made, depth + 1

    return after
