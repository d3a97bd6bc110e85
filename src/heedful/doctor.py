"""Doctor: can the attention of this model be seen, is it the same attention, and what computes it here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .about import Layer, versions
from .checkpoint import Checkpoint, load
from .huggingface import attention_modules, coverage, watching
from .inputs import allowed_length
from .looking import Look
from .ops.dispatch import fusable
from .scan import evaluating, prepare, run
from .statistics import Entropy

TOKENS = 24
FAR = 1e-3  # a relative difference that rounding does not explain


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found."""

    model: str
    layers: dict[str, Layer]  # that were reached
    missed: dict[str, str]  # that were not, and why
    difference: float  # the largest difference between the model's own attention and what is seen, on valid tokens
    length: int  # tokens of a text that a scan reads
    kernel: str  # what computes a hop on this device
    versions: dict[str, str]

    @property
    def healthy(self) -> bool:
        """Whether a scan of this model can be trusted."""
        return bool(self.layers) and self.difference < FAR  # false for nan

    @property
    def verdict(self) -> str:
        """Whether to scan it, and why not."""
        if self.healthy:
            return "healthy: scan it"
        if not self.layers:
            why = "no attention layer is seen"
        elif self.difference != self.difference:
            why = "no layer can be compared, or what they give is not finite"
        else:
            why = "what is seen is not the model's own attention"
        return f"not to be trusted: do not scan ({why})"


def doctor(model: str | Path | nn.Module | Checkpoint) -> Diagnosis:
    """Let a model read a little made-up input, through its own attention and through the seam."""
    checkpoint = load(model)
    with evaluating(checkpoint.model):
        return _examined(checkpoint, prepare(checkpoint.model, made_up(checkpoint)))


def _examined(checkpoint: Checkpoint, inputs: dict[str, Any]) -> Diagnosis:
    own = _states(checkpoint.model, inputs)
    found = coverage(checkpoint.model, lambda: run(checkpoint.model, inputs))
    look = Look((Entropy,), None, 0)
    seen: dict[str, Tensor] | None = None
    if found.reached:
        with watching(checkpoint.model, look.call):
            seen = _states(checkpoint.model, inputs)
    return Diagnosis(
        checkpoint.name,
        look.shapes,
        dict(found.missed),
        float("nan") if seen is None else _difference(own, seen, inputs),
        allowed_length(checkpoint, None),
        _kernel(checkpoint),
        versions(),
    )


def made_up(checkpoint: Checkpoint) -> dict[str, Any]:
    """Inputs of the right kind for a model, made from a seed: two texts of different length, two images, or two sounds."""
    generator = torch.Generator().manual_seed(0)
    model, config = checkpoint.model, checkpoint.config
    name = getattr(model, "main_input_name", "input_ids")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if name == "input_ids":
        size = getattr(config.get_text_config(), "vocab_size", 100)
        length = min(TOKENS, allowed_length(checkpoint, None))
        ids = torch.randint(min(5, size - 1), size, (2, length), generator=generator, device="cpu")
        real = torch.ones_like(ids)
        real[1, length - length // 3 :] = 0
        return {"input_ids": ids.to(checkpoint.device), "attention_mask": real.to(checkpoint.device)}
    shape = _shape(model, name, config)
    return {name: torch.randn(2, *shape, generator=generator, device="cpu").to(checkpoint.device, dtype)}


def _shape(model: nn.Module, name: str, config: Any) -> tuple[int, ...]:
    if name == "pixel_values":
        side = getattr(config, "image_size", 224)
        return (getattr(config, "num_channels", 3), *(side if isinstance(side, list | tuple) else (side, side)))
    if name == "input_features" and hasattr(config, "num_mel_bins"):
        return (config.num_mel_bins, 2 * getattr(config, "max_source_positions", 1500))
    if name == "input_values":
        return (16000,)
    raise ValueError(f"{type(model).__name__} reads {name!r}, for which no made-up input is known; scan it with inputs of yours.")


def _states(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each attention module hands on, by its name."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                found[name] = first.float()

        return after

    handles = [module.register_forward_hook(keep(name)) for name, module in attention_modules(model).items()]
    try:
        run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _difference(own: dict[str, Tensor], seen: dict[str, Tensor], inputs: dict[str, Any]) -> float:
    """The largest relative difference on real tokens; nan where nothing can be compared or something is not finite."""
    real = inputs.get("attention_mask")
    found = []
    for name in own.keys() & seen.keys():
        a, b = own[name], seen[name]
        if real is not None and a.shape[:2] == real.shape:
            a, b = a[real.bool()], b[real.bool()]
        found.append((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
    return torch.stack(found).max().item() if found else float("nan")  # torch's max keeps a nan


def _kernel(checkpoint: Checkpoint) -> str:
    dtype = next((p.dtype for p in checkpoint.model.parameters() if p.is_floating_point()), torch.float32)
    probe = torch.zeros(1, 1, 2, 8, dtype=dtype, device=checkpoint.device)
    name = "torch's fused attention" if fusable(probe, probe, probe) else "the plain formula"
    return f"{name} ({checkpoint.device.type}, {str(dtype).removeprefix('torch.')})"
