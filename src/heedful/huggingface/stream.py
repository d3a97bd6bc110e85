"""Stream: which sums in a transformer block add attention and the MLP to what flows through it, found while the block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SUMS = {
    torch.add,
    Tensor.add,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__iadd__,
}
SAME = {Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.to, Tensor.float, Tensor.clone, torch.reshape}

Judge = Callable[[str, Tensor, Tensor, bool], Tensor]


class Lost(RuntimeError):
    """A block whose sums are not those of a transformer; the message says what was found."""


class Stream:
    """One run of a block: its input, that plus attention, that plus the MLP are its stream; in a parallel block both are added to the input.

    `judge(name, stream, branch, shared)` gives what takes the place of the sum named "attention" or "mlp"; `shared` where attention
    and the MLP stand side by side.
    """

    def __init__(self, x: Tensor, judge: Judge):
        self.judge, self.size = judge, x.numel()
        self.found: set[str] = set()
        self.attended = 0
        self._kept: list[Tensor] = []  # so that no id is used twice
        self._stream: set[int] = set()
        self._branch: set[int] = set()
        self._flow(x)

    def _flow(self, x: Tensor) -> None:
        """x is the stream from here on."""
        self._stream, self._branch = {id(x)}, set()
        self._kept.append(x)

    def _also(self, place: set[int], x: Tensor) -> None:
        place.add(id(x))
        self._kept.append(x)

    @property
    def done(self) -> bool:
        return self.found == {"attention", "mlp"}

    def is_stream(self, x: Any) -> bool:
        return id(x) in self._stream

    def attention(self, out: Tensor) -> None:
        """The attention module of the block has given this."""
        self.attended += 1
        if self.attended > 1:
            raise Lost("it attends more than once (to itself and to another text, say)")
        self._also(self._branch, out)

    def normed(self, before: Tensor, after: Tensor) -> None:
        """A norm of the block was applied; in a post-norm block the stream goes on behind it."""
        if self.found and self.is_stream(before):
            self._also(self._stream, after)

    def saw(self, function: Any, args: tuple, out: Any) -> None:
        """Follow what is computed from the branch, and what is the stream in another shape."""
        tensors = list(_tensors(args))
        if function in SAME and tensors and self.is_stream(tensors[0]):
            self._also(self._stream, out)
        elif any(id(t) in self._branch or (self.found and self.is_stream(t)) for t in tensors):
            for made in _tensors((out,)):
                if not self.is_stream(made):
                    self._also(self._branch, made)

    def sum(self, a: Any, b: Any) -> Tensor | None:
        """What takes the place of a + b, None where it stays."""
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or self.done or not a.numel() == b.numel() == self.size:
            return None
        ours = [self.is_stream(t) for t in (a, b)]
        if sum(ours) == 1:
            return self._added(*((a, b) if ours[0] else (b, a)))
        ours = [id(t) in self._branch for t in (a, b)]
        if sum(ours) == 1 and not self.found:  # attention and the MLP, before either meets the stream
            self.found.add("mlp")
            attended, other = (a, b) if ours[0] else (b, a)
            made = self.judge("mlp", attended, other, True)
            self._also(self._branch, made)
            return made
        return None

    def _added(self, stream: Tensor, branch: Tensor) -> Tensor:
        name, follows = "attention" if "attention" not in self.found else "mlp", id(branch) in self._branch
        if name == "attention" and not follows:
            raise Lost(
                "something is added to its input before its attention module has answered (the skip may lie within that module)"
            )
        self.found.add(name)
        made = self.judge(name, stream, branch, not follows)
        self._flow(made)
        return made


def _tensors(given: Any) -> Iterator[Tensor]:
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list):
            yield from _tensors(x)


class Following(TorchFunctionMode):
    """Shows every torch call to the stream of the block that runs, and lets it answer sums."""

    def __init__(self):
        super().__init__()
        self.stream: Stream | None = None
        self.refuse: Callable[[Lost], Exception] = lambda lost: lost

    def asked(self, question: Callable[..., Any], *args: Any) -> Any:
        """The stream's answer; where it is lost, the refusal."""
        try:
            return question(*args)
        except Lost as lost:
            raise self.refuse(lost) from None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.stream is None:
            return func(*args, **kwargs)
        if func in SUMS and len(args) == 2 and not kwargs:
            made = self.asked(self.stream.sum, *args)
            if made is not None:
                return made
        out = func(*args, **kwargs)
        self.stream.saw(func, (*args, *kwargs.values()), out)
        return out
