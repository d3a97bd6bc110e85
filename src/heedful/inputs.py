"""Inputs: items become model inputs, cut to length, grouped by length into batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .texts import Image, Item, Long, Sound, Tokens
from .tokens import check_ids, pieces, text_config, tokenized

DEFAULT = 2048  # tokens, where neither the caller nor the model says less
TOKENS = 8192  # tokens that one batch holds at most
OTHERS = {"pixel_values", "input_features", "input_values"}
SHORT = 64  # tokens below which padding costs nothing worth a batch of its own


@dataclass(frozen=True, eq=False)
class Sample:
    """One thing to read: token ids, or an image, a sound or ready-made inputs that are opened when their turn comes."""

    item: Tokens | Image | Sound | Mapping
    size: int  # tokens; 1 where the model makes them all alike

    @property
    def kind(self) -> str:
        return type(self.item).__name__ if not isinstance(self.item, Mapping) else "Mapping"


@dataclass(frozen=True, eq=False)
class Reading:
    """All that a scan reads, in batches whose order depends on nothing but the texts."""

    batches: list[list[Sample]]
    truncated: int
    length: int

    @property
    def size(self) -> int:
        return sum(sample.size for group in self.batches for sample in group)

    @property
    def longest(self) -> int:
        return max(sample.size for group in self.batches for sample in group)

    @property
    def digest(self) -> str:
        """Tells readings of other texts or other batches apart."""
        return hashlib.sha256(str([[_mark(sample.item) for sample in group] for group in self.batches]).encode()).hexdigest()


def _mark(item: Any) -> str:
    """What tells an item apart from others."""
    if isinstance(item, Tokens):
        return str(item.ids)
    if isinstance(item, Mapping):
        return str([(name, _mark(value)) for name, value in sorted(item.items())])
    if isinstance(item, Image | Sound):
        return _mark(item.source if isinstance(item, Image) else item.wave)
    if hasattr(item, "tobytes"):  # an opened image
        return hashlib.sha256(item.tobytes()).hexdigest()
    if isinstance(item, Tensor):
        return hashlib.sha256(item.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return hashlib.sha256(item).hexdigest() if isinstance(item, bytes) else str(item)


def read(checkpoint: Checkpoint, items: list[Item], batch: int, length: int | None, limit: int | None = None) -> Reading:
    """Turn items into batches of at most `batch`, none longer than `length` tokens, `limit` of them in all."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; read at least 1 text at a time.")
    length = allowed_length(checkpoint, length)
    samples, truncated = [], 0
    for sample, cut in islice(_samples(checkpoint, items, length), limit):  # pieces of a long text count one by one
        samples.append(sample)
        truncated += cut
    return Reading(_grouped(samples, batch), truncated, length)


def allowed_length(checkpoint: Checkpoint, wanted: int | None) -> int:
    """How many tokens of a text are read: as asked, else what the model has positions for, at most 2048."""
    own = getattr(checkpoint.tokenizer, "model_max_length", None)
    positions = _positions(checkpoint)
    if wanted is None:
        return min([DEFAULT, *positions, *([own] if isinstance(own, int) and own > 0 else [])])
    if wanted < 1:
        raise ValueError(f"length is {wanted}; read at least 1 token of each text.")
    if positions and wanted > min(positions):
        raise ValueError(f"length is {wanted} but the model has positions for {min(positions)} tokens; give at most that.")
    return wanted


def _positions(checkpoint: Checkpoint) -> list[int]:
    """What limits the tokens of a text: positions in the configuration, less where those of RoBERTa and its like start after the padding."""
    limits = [getattr(text_config(checkpoint), name, None) for name in ("max_position_embeddings", "n_positions")]
    found = [x for x in limits if isinstance(x, int) and x > 0]
    for name, module in checkpoint.model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None and getattr(module, "num_embeddings", None) in found:
            found.append(module.num_embeddings - padding - 1)
    return found


def _samples(checkpoint: Checkpoint, items: list[Item], length: int) -> Iterator[tuple[Sample, bool]]:
    """Each sample with whether it was cut short."""
    texts = [item for item in items if isinstance(item, str)]
    ids = tokenized(checkpoint, texts, length) if texts else iter(())
    for item in items:
        if isinstance(item, str):
            yield _cut(next(ids), length, checkpoint)
        elif isinstance(item, Long):
            for piece in pieces(checkpoint, item.text, length):
                yield Sample(Tokens(piece), len(piece)), False
        elif isinstance(item, Tokens):
            check_ids(checkpoint, item.ids)
            yield _cut(item.ids, length, None)
        elif isinstance(item, Mapping):
            inputs = _as_tensors(checkpoint, item)
            yield Sample(inputs, _tokens_of(inputs)), False
        else:
            yield Sample(item, 1), False


def _cut(ids: list[int], length: int, checkpoint: Checkpoint | None) -> tuple[Sample, bool]:
    if len(ids) <= length:
        return Sample(Tokens(ids), len(ids)), False
    last = ids[-1:] if checkpoint is not None and ids[-1] in checkpoint.tokenizer.all_special_ids else []
    short = ids[: length - len(last)] + last  # a closing [SEP] or </s> stays
    return Sample(Tokens(short), length), True


def _as_tensors(checkpoint: Checkpoint, inputs: Mapping) -> dict[str, Any]:
    """Ready-made inputs, lists of numbers as tensors; token ids in one row, as a tokenizer gives for one text, as a batch of one."""
    found = {name: _as_tensor(name, value) for name, value in inputs.items()}
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        if isinstance(found.get(name), Tensor) and found[name].ndim == 1:
            found[name] = found[name][None]
    if isinstance(found.get("input_ids"), Tensor) and not found.keys() & OTHERS:  # places of images may lie beyond the words
        check_ids(checkpoint, found["input_ids"].flatten().tolist())
    return found


def _as_tensor(name: str, value: Any) -> Any:
    if not isinstance(value, list | tuple) and not hasattr(value, "__array__"):
        return value
    try:
        return torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"ready-made inputs hold {name!r} that makes no tensor ({error}); let the tokenizer pad: padding=True, return_tensors='pt'."
        ) from error


def _tokens_of(inputs: Mapping) -> int:
    for name in ("attention_mask", "input_ids"):
        if isinstance(inputs.get(name), Tensor) and inputs[name].ndim == 2:
            return int(inputs[name].sum()) if name == "attention_mask" else inputs[name].numel()
    return 1


def _grouped(samples: list[Sample], batch: int) -> list[list[Sample]]:
    """Longest first, so that a batch too large for memory fails at once; in a batch no text is much shorter than another."""
    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: (s.kind, -s.size)):
        if not groups or not _fits(sample, groups[-1], batch):
            groups.append([])
        groups[-1].append(sample)
    return groups


def _fits(sample: Sample, group: list[Sample], batch: int) -> bool:
    longest = group[0].size
    alike = sample.kind == group[0].kind != "Mapping" and (sample.size >= 0.75 * longest or longest <= SHORT)
    return alike and len(group) < batch and (len(group) + 1) * longest <= TOKENS


def collate(checkpoint: Checkpoint, group: list[Sample]) -> dict[str, Any]:
    """The model inputs of one batch, on the model's device."""
    first = group[0].item
    if isinstance(first, Mapping):
        inputs = dict(first)
    elif isinstance(first, Tokens):
        inputs = _padded([s.item.ids for s in group if isinstance(s.item, Tokens)], _filler(checkpoint))
    elif isinstance(first, Image):
        inputs = _images(checkpoint, [s.item for s in group if isinstance(s.item, Image)])
    else:
        inputs = _sounds(checkpoint, [s.item for s in group if isinstance(s.item, Sound)])
    floats = next((p.dtype for p in checkpoint.model.parameters() if p.is_floating_point()), torch.float32)
    return {name: _placed(x, checkpoint.device, floats) for name, x in inputs.items()}


def _placed(value: Any, device: torch.device, floats: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, floats if value.is_floating_point() else value.dtype)


def _padded(ids: list[list[int]], filler: int) -> dict[str, Tensor]:
    longest = max(map(len, ids))
    padded = torch.tensor([row + [filler] * (longest - len(row)) for row in ids])
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    return {"input_ids": padded, "attention_mask": real}


def _filler(checkpoint: Checkpoint) -> int:
    known = (getattr(place, "pad_token_id", None) for place in (checkpoint.tokenizer, checkpoint.config))
    return next((x for x in known if isinstance(x, int) and x >= 0), 0)


def _images(checkpoint: Checkpoint, images: list[Image]) -> dict[str, Any]:
    maker = getattr(checkpoint.processor, "image_processor", checkpoint.processor)
    if maker is None or "pixel_values" not in getattr(maker, "model_input_names", ()):
        raise ValueError(f"{checkpoint.name} has no image processor; give it {_food(checkpoint)}.")
    return dict(maker(images=[image.open() for image in images], return_tensors="pt"))


def _sounds(checkpoint: Checkpoint, sounds: list[Sound]) -> dict[str, Any]:
    maker = getattr(checkpoint.processor, "feature_extractor", checkpoint.processor)
    rate = getattr(maker, "sampling_rate", None)
    if rate is None:
        raise ValueError(f"{checkpoint.name} has no feature extractor for sounds; give it {_food(checkpoint)}.")
    wrong = sorted({sound.rate for sound in sounds if sound.rate not in (None, rate)})  # type: ignore[type-var]
    if wrong:
        raise ValueError(f"sounds are sampled at {wrong[0]} Hz but {checkpoint.name} hears {rate} Hz; resample them to {rate} Hz.")
    waves = [sound.wave.numpy() for sound in sounds]
    return dict(maker(waves, sampling_rate=rate, return_tensors="pt", return_attention_mask=True, padding=True))


def _food(checkpoint: Checkpoint) -> str:
    return "text" if checkpoint.tokenizer is not None else "ready-made inputs (a list of mappings)"
