"""Growing: a model reads texts with its loss, and the growth statistics of every attention layer are added up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .checkpoint import Checkpoint, load
from .files import write
from .huggingface.lessons import lessons
from .inputs import collate, read
from .scan import evaluating
from .statistics.growth import Growth
from .texts import items

SCHEMA = 1
Loss = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, int]]


@dataclass(frozen=True, eq=False)
class Growths:
    """Growth statistics by layer, of one model; `+` adds those of other texts or machines."""

    fingerprint: str  # of the model
    layers: dict[str, Growth] = field(default_factory=dict)

    def __add__(self, other: Growths) -> Growths:
        if self.fingerprint != other.fingerprint:
            raise ValueError("these growth statistics are of two models; measure both on one.")
        names = list(dict.fromkeys([*self.layers, *other.layers]))
        found = {name: [x.layers[name] for x in (self, other) if name in x.layers] for name in names}
        return Growths(
            self.fingerprint, {name: parts[0] + parts[1] if len(parts) > 1 else parts[0] for name, parts in found.items()}
        )

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all."""
        from safetensors.torch import save

        tensors = {f"{name}/{part}": x.cpu().contiguous() for name, g in self.layers.items() for part, x in g.tensors.items()}
        header = {"schema": SCHEMA, "fingerprint": self.fingerprint, "layers": list(self.layers)}
        return write(path, save(tensors, {"heedful": json.dumps(header)}))

    @classmethod
    def load(cls, path: str | Path) -> Growths:
        """Read growth statistics back."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).exists():
            raise FileNotFoundError(f"there are no growth statistics at {path}; give the file that `save` wrote.")
        try:
            with safe_open(str(path), "pt") as file:
                header = json.loads((file.metadata() or {})["heedful"])
                parts: dict[str, dict[str, Tensor]] = {name: {} for name in header["layers"]}
                for key in file.keys():  # noqa: SIM118
                    name, _, part = key.rpartition("/")
                    parts[name][part] = file.get_tensor(key)
            return cls(header["fingerprint"], {name: Growth(**held) for name, held in parts.items()})
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged or holds no growth statistics ({error}); measure again, or load another copy."
            ) from error


def measure_growth(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any,
    loss: Loss | None = None,
    start: int = 0,
    batch: int = 8,
    length: int | None = None,
    limit: int | None = None,
    layers: Iterable[str] | None = None,
) -> Growths:
    """What growing each attention layer could do about the loss on these texts; dropout is off, and no parameter changes.

    `loss(model, inputs)` gives the loss of a batch as a sum, and over how many tokens or texts; without it the model's own: of `labels`
    among ready-made inputs, or of the next token. Texts fall by turns into two folds that judge each other; `start` is the number of
    the first one, so that parts on several machines add up to one pass.
    """
    checkpoint, loss = load(model), loss or model_loss
    wanted = None if layers is None else set(layers)
    found, own = Growths(checkpoint.fingerprint), items(texts, limit)
    with evaluating(checkpoint.model):
        for parity in (0, 1):
            some = own[parity::2]
            if not some:
                continue
            for group in read(checkpoint, some, batch, length, limit).batches:
                inputs = collate(checkpoint, group)
                found = found + Growths(
                    found.fingerprint, growth_of_batch(checkpoint.model, inputs, loss, (start + parity) % 2, wanted)
                )
    unknown = sorted(wanted - found.layers.keys()) if wanted is not None else []
    if unknown:
        raise ValueError(f"no attention call of {', '.join(unknown)} was seen; the layers are named as in a scan's findings.")
    return found


def growth_of_batch(
    model: nn.Module, inputs: dict[str, Any], loss: Loss, fold: int, layers: set[str] | None = None
) -> dict[str, Growth]:
    """The growth statistics of one batch, whose texts are all of one fold, by layer."""
    counted: list[int] = []

    def total() -> Tensor:
        value, count = loss(model, inputs)
        counted.append(count)
        return value

    value, seen = lessons(model, total, layers)
    found: dict[str, Growth] = {}
    for lesson in seen:
        again = lesson.layer in found  # a layer that is called again (ALBERT) brings gradients, not texts
        part = Growth.of_lesson(lesson, fold, *((0.0, 0.0) if again else (float(value), counted[0])))
        found[lesson.layer] = found[lesson.layer] + part if again else part
    return found


def model_loss(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The model's own loss, as a sum: of the labels among its inputs, else of each next token."""
    given = dict(inputs)
    if "labels" not in given:
        if not _writes(model):
            raise ValueError(
                f"{type(model).__name__} has no loss for inputs without labels; give loss=, a function of the model and a batch that returns the "
                "summed loss and over how many tokens or texts it is, or ready-made inputs with labels."
            )
        given["labels"] = _next_tokens(given)
    answer = model(**given)
    if getattr(answer, "loss", None) is None:
        raise ValueError(f"{type(model).__name__} computes no loss from labels; give loss=.")
    count = _graded(model, given["labels"])
    return answer.loss * count, count


def _writes(model: nn.Module) -> bool:
    return "ForCausalLM" in type(model).__name__ or "LMHeadModel" in type(model).__name__


def _next_tokens(inputs: dict[str, Any]) -> Tensor:
    ids, real = inputs["input_ids"], inputs.get("attention_mask")
    return ids if real is None else ids.masked_fill(real == 0, -100)


def _graded(model: nn.Module, labels: Tensor) -> int:
    """Over how many labels the model's mean is; causal models shift them."""
    if labels.is_floating_point():
        return labels.numel()
    own = labels[..., 1:] if _writes(model) else labels
    return int((own != -100).sum())
