"""Ablate: run a transformer without its attention skip, its MLPs or its norms, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .modules import attention_modules
from .stacks import stacks
from .stream import Following, Lost, Stream


class Unablatable(RuntimeError):
    """A model whose blocks cannot be taken apart; the message names the block and says why."""


@dataclass(frozen=True)
class Ablation:
    """What every block of a model does without.

    The skip is that around attention. An MLP goes with its skip and its norm; norms are those of the blocks, not those of queries and
    keys within attention nor the last one of the model.
    """

    skip: bool = True
    mlp: bool = True
    norms: bool = True


ABLATIONS: dict[str, Ablation] = {
    "full": Ablation(),
    "no MLP": Ablation(mlp=False),
    "no attention skip": Ablation(skip=False),
    "SAN + LN": Ablation(skip=False, mlp=False),
    "pure SAN": Ablation(skip=False, mlp=False, norms=False),
}


@contextmanager
def ablated(model: nn.Module, ablation: str | Ablation) -> Iterator[None]:
    """Inside the block the model's forward pass goes without what the ablation names; its weights and its code are untouched.

    >>> from transformers import ViTConfig, ViTModel
    >>> size = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, image_size=4, patch_size=2)
    >>> model = ViTModel(ViTConfig(**size)).eval()
    >>> layer, x = model.layers[0], torch.randn(1, 5, 8)
    >>> with torch.no_grad(), ablated(model, "pure SAN"):
    ...     alone = layer(x)
    >>> torch.allclose(alone, layer.attention(x)[0], atol=1e-6)
    True

    The sums with attention and with the MLP are found while each block runs (`stream.py`), so no family is named here. Where that
    fails, `Unablatable` says which block and why.
    """
    chosen = _named(ablation)
    if chosen == ABLATIONS["full"]:
        yield
        return
    attending = attention_modules(model)
    names = [name for stack in stacks(attending).values() for name in stack]
    if not names:
        raise Unablatable(f"{type(model).__name__} has no numbered blocks with an attention module; give a transformer.")
    with ExitStack() as stack:
        run = _Run(type(model).__name__, chosen, stack.enter_context(_following()))
        for name in names:
            run.hook(stack, name, model.get_submodule(name), {m for n, m in attending.items() if n.startswith(f"{name}.")})
        yield


def _named(ablation: str | Ablation) -> Ablation:
    if isinstance(ablation, Ablation):
        return ablation
    if ablation not in ABLATIONS:
        raise ValueError(f"there is no ablation {ablation!r}; give one of {', '.join(map(repr, ABLATIONS))}, or an Ablation.")
    return ABLATIONS[ablation]


@contextmanager
def _following() -> Iterator[Following]:
    with Following() as mode:
        yield mode


@dataclass
class _Run:
    """The hooks of one ablation."""

    model: str
    ablation: Ablation
    mode: Following

    def hook(self, stack: ExitStack, name: str, block: nn.Module, attending: set[nn.Module]) -> None:
        """Follow one block, its attention and its norms; the stack takes the hooks off."""
        inside = {m for module in attending for m in module.modules()}
        handles = [
            block.register_forward_pre_hook(partial(self._begins, name), with_kwargs=True),
            block.register_forward_hook(partial(self._ends, name), always_call=True),
            *(module.register_forward_hook(self._attends) for module in attending),
            *(m.register_forward_hook(self._norms) for m in block.modules() if m not in inside and _is_norm(m)),
        ]
        for handle in handles:
            stack.callback(handle.remove)

    def _begins(self, name: str, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(given, Tensor):
            raise Unablatable(self._message(name, f"it reads {type(given).__name__} where hidden states were expected"))
        self.mode.stream, self.mode.refuse = Stream(given, self._judge), partial(self._refuse, name)

    def _ends(self, name: str, block: nn.Module, args: tuple, output: Any) -> None:
        stream, self.mode.stream = self.mode.stream, None
        if stream is not None and output is not None and not stream.done:
            missing = " and ".join(sorted({"attention", "mlp"} - stream.found))
            raise Unablatable(self._message(name, f"no sum of its input with {missing} was seen"))

    def _attends(self, module: nn.Module, args: tuple, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if self.mode.stream is not None and isinstance(first, Tensor):
            self.mode.asked(self.mode.stream.attention, first)

    def _norms(self, module: nn.Module, args: tuple, output: Any) -> Any:
        stream = self.mode.stream
        if stream is None or not args:
            return None
        gone = not self.ablation.mlp and stream.done and stream.is_stream(args[0])
        if gone or not self.ablation.norms:
            return args[0]
        stream.normed(args[0], output)
        return None

    def _judge(self, name: str, stream: Tensor, branch: Tensor, shared: bool) -> Tensor:
        if shared and self.ablation.mlp and not self.ablation.skip:
            raise Lost("attention and the MLP stand side by side and share one skip, so attention has none of its own to lose")
        if name == "mlp":
            return stream + branch if self.ablation.mlp else stream
        return stream + branch if self.ablation.skip else branch

    def _refuse(self, name: str, lost: Lost) -> Unablatable:
        return Unablatable(self._message(name, str(lost)))

    def _message(self, name: str, why: str) -> str:
        return f"{self.model} cannot be ablated: in {name} {why}."


def _is_norm(module: nn.Module) -> bool:
    """A layer that normalises tokens, by its name; LayerNorm, LlamaRMSNorm, T5LayerNorm."""
    return "Norm" in type(module).__name__ and not any(module.children())
