"""Saving: a model with resized attention in a folder that is whole or absent, and back."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from .huggingface import attention_modules, swapped
from .huggingface.adopt import adopt, empty, matrices, reshape
from .huggingface.layer import Resized
from .huggingface.sizes import natives, plan_of, sizes_after
from .huggingface.stock import blank
from .plan import FILE, Plan

WEIGHTS = "heedful.safetensors"  # no name that stock transformers would load, and fill up with random matrices


def save(model: Any, processor: Any, folder: str | Path) -> Path:
    """Write a model and its processor: as transformers does where stock transformers can load it, else with its plan beside its weights."""
    if swapped(model):
        raise ValueError(
            f"{next(iter(swapped(model)))} attends by a swapped mechanism, which is not saved with a model; hd.unswap(model) first."
        )
    stock = as_stock(model)
    with _whole(Path(folder)) as place:
        if stock is not None:
            stock.save_pretrained(place)
        else:
            plan = plan_of(model)
            assert plan is not None
            _config(model).save_pretrained(place)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(place)
            save_model(model, str(place / WEIGHTS))
            plan.save(place / FILE)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(place)
    return Path(folder)


def restore(folder: Path, make: Any, config: Any, dtype: torch.dtype | None) -> nn.Module:
    """The model of a folder that `save` wrote with a plan: built from its configuration, brought to its sizes, loaded strictly."""
    plan = Plan.load(folder)
    model: Any = blank(make, config, dtype or _dtype(folder / WEIGHTS))
    plan.check(natives(model), config.model_type)
    held = _names(folder / WEIGHTS)
    adopt(model, plan.layers)
    for name, change in plan.layers.items():
        module: Any = model.get_submodule(name)
        sizes = sizes_after(module.sizes, change)
        made = empty(matrices(model, name), sizes)
        gone = {f"b_{word}": None for word, part in zip("qkv", module.names, strict=True) if f"{name}.{part}.bias" not in held}
        reshape(model, name, replace(made, **gone), sizes)
    _filled(model, folder / WEIGHTS)
    return model.eval()


def as_stock(model: Any) -> Any:
    """The model as its family's own class, where that can hold these sizes: none resized, or one size everywhere that its settings name."""
    resized = {name: module for name, module in model.named_modules() if isinstance(module, Resized)}
    if not resized:
        return model
    dims = {d for module in resized.values() for d in (*module.sizes.qk, *module.sizes.v)}
    settings = {module.places.size for module in resized.values()}
    more = any(module.sizes.heads != module.first.heads for module in resized.values())
    if more or len(dims) > 1 or len(settings) > 1 or None in settings or resized.keys() != attention_modules(model).keys():
        return None
    config = copy.deepcopy(_config(model))
    setattr(config, str(settings.pop()), dims.pop())
    dtype = next(p.dtype for p in model.parameters())
    stock: Any = blank(type(model), config, dtype)
    weights = dict(model.state_dict())
    for name, module in resized.items():
        factor = module.scaling / stock.get_submodule(name).scaling  # stock computes its scale from the size
        for part in ("weight", "bias"):
            key = f"{name}.{module.names[0]}.{part}"
            if key in weights:
                weights[key] = weights[key] * factor
    for name, tensor in stock.state_dict().items():
        if name not in weights:  # a bias of keys, which changes nothing
            weights[name] = torch.zeros_like(tensor)
    stock.load_state_dict(weights, strict=True)
    if getattr(model, "generation_config", None) is not None:
        stock.generation_config = model.generation_config
    return stock.eval()


def _config(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters())
    return config


def _dtype(path: Path) -> torch.dtype:
    """Of the first floating-point tensor in a file."""
    with _readable(path), safe_open(str(path), "pt") as file:
        found = (file.get_tensor(name).dtype for name in file.keys())  # noqa: SIM118
        return next((dtype for dtype in found if dtype.is_floating_point), torch.float32)


def _names(path: Path) -> set[str]:
    with _readable(path), safe_open(str(path), "pt") as file:
        return set(file.keys())


def _filled(model: nn.Module, path: Path) -> None:
    with _readable(path):
        load_model(model, str(path), strict=True)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} is damaged, or does not fit its plan ({str(error).splitlines()[0]}); save the model again, or copy it whole."
        ) from error


def check_folder(folder: Path) -> None:
    """Refuse a place that holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty; give a new folder.")


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder beside the wanted one, which takes its name once all is written; nothing is left where that fails."""
    check_folder(folder)
    beside = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield beside
        os.chmod(beside, 0o755)
        os.replace(beside, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or error}. Nothing was left; make room or give another folder."
        ) from error
    finally:
        if beside is not None:
            with suppress(OSError):
                shutil.rmtree(beside)
