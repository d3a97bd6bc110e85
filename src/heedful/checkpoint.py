"""Checkpoint: a model with the processor that feeds it, from a hub id, a folder or a .gguf file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .plan import Plan

REMEDY = "give a hub id such as org/name, a folder with a config.json, or a .gguf file"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model, what makes its inputs (tokenizer, image processor, feature extractor or all in one; None where there is none), a name."""

    model: nn.Module
    processor: Any = None
    name: str = "model"

    @property
    def config(self) -> Any:
        return getattr(self.model, "config", None)

    @property
    def tokenizer(self) -> Any:
        """What turns text into token ids, if there is such a thing."""
        found = getattr(self.processor, "tokenizer", self.processor)
        return found if hasattr(found, "convert_tokens_to_ids") else None

    @property
    def plan(self) -> Plan | None:
        """The sizes that its layers were given, None where they are those of its family."""
        from .huggingface.sizes import plan_of

        return plan_of(self.model)

    def save(self, folder: str | Path) -> Path:
        """Write it so that `load` gives it back: as transformers does where stock transformers can load it, else its weights and plan.json.

        The folder is whole or absent.
        """
        from .saving import save

        return save(self.model, self.processor, folder)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def fingerprint(self) -> str:
        """A digest that tells models with other weights, another configuration or other mechanisms apart, on any machine."""
        whole = hashlib.sha256()
        if self.config is not None:
            known = {k: v for k, v in self.config.to_dict().items() if k not in ("_name_or_path", "transformers_version", "dtype")}
            whole.update(json.dumps(known, sort_keys=True, default=str).encode())
        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] == "heedful":  # a mechanism that was swapped in
                whole.update(f"{name} {module!r}".encode())
        for name, tensor in self.model.state_dict().items():
            _digest(whole, name, tensor)
        return whole.hexdigest()


def load(
    source: str | Path | nn.Module | Checkpoint,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    remote_code: bool = False,
) -> Checkpoint:
    """Load a model and its processor; safe by default: no pickled objects, and no code of the checkpoint's own unless `remote_code`.

    `device` is a GPU where there is one, `dtype` float32 on a CPU and the checkpoint's own on a GPU.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, nn.Module):
        return Checkpoint(source, None, type(source).__name__)
    device = _device(device)
    place, options = _located(source)
    if options.get("gguf_file") is None:
        _refuse_foreign_code(place, str(source), remote_code)
    options["trust_remote_code"] = remote_code  # where nothing is said transformers asks on the terminal
    wanted = dtype or (torch.float32 if device.type == "cpu" else "auto")
    if (Path(place) / "plan.json").exists() and (Path(place) / "config.json").exists():
        return _resized(place, options, str(source), device, None if wanted == "auto" else wanted)  # type: ignore[arg-type]
    try:
        model, told = _model_class(place, options).from_pretrained(place, dtype=wanted, output_loading_info=True, **options)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot load {source}: {_first_line(error)}") from error
    _refuse_gaps(model, told["missing_keys"], str(source))
    return Checkpoint(model.to(device).eval(), _processor(place, options, str(source)), _short(str(source)))


def _resized(place: str, options: dict[str, Any], source: str, device: torch.device, dtype: torch.dtype | None) -> Checkpoint:
    """A folder that `Checkpoint.save` wrote with a plan."""
    import transformers

    from .saving import restore

    config = transformers.AutoConfig.from_pretrained(place, **options)
    make = getattr(transformers, (config.architectures or ["?"])[0], None)
    if make is None:
        raise ValueError(
            f"{source} holds a {config.architectures} with a plan, which this transformers does not know; upgrade transformers."
        )
    model = restore(Path(place), make, config, dtype)
    return Checkpoint(model.to(device), _processor(place, options, source), _short(source))


def _device(wanted: str | torch.device | None) -> torch.device:
    """The device that was asked for, if it is there; unasked a GPU where there is one."""
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"there is no device {wanted!r}; give cpu, cuda, cuda:1 or another that torch knows.") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"device is {device} but torch finds {count} GPUs here; give cpu, or install torch with CUDA and a driver."
        )
    return device


def _digest(whole: Any, name: str, tensor: Any) -> None:
    """Add the bytes of a tensor, in small pieces; half precision counts as the float32 that a CPU would load."""
    if not isinstance(tensor, Tensor):
        whole.update(f"{name} {tensor!r}".encode())
        return
    whole.update(f"{name} {tuple(tensor.shape)}".encode())
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    for part in tensor.detach().reshape(-1).split(2**20):
        exact = part.cpu().float() if half else part.cpu()
        whole.update(exact.contiguous().view(torch.uint8).numpy())


def _refuse_gaps(model: nn.Module, missing: Iterable[str], source: str) -> None:
    """Refuse a checkpoint that lacks weights of the model's body, which would be random; a head or a pooler may be untrained."""
    prefix = getattr(model, "base_model_prefix", "")
    body = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    gaps = sorted(name for name in missing if name.startswith(body) and "pooler" not in name)
    if gaps:
        some = ", ".join(gaps[:3]) + (f" and {len(gaps) - 3} more" if len(gaps) > 3 else "")
        raise ValueError(f"{source} lacks weights of {type(model).__name__}: {some}; copy or save the model again, whole.")


def _located(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Where transformers finds the checkpoint, and what it must be told."""
    path = Path(source)
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.is_file():
        raise ValueError(f"{source} is a file but no .gguf; {REMEDY}.")
    if path.is_dir():
        if (path / "config.json").exists():
            return str(path), {}
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return str(path), {"gguf_file": files[0].name}
        raise ValueError(f"the folder {source} has no config.json and {len(files)} .gguf files; {REMEDY}.")
    if isinstance(source, Path) or not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", source):
        raise FileNotFoundError(f"there is no file or folder {source}; {REMEDY}.")
    return source, {}


def _refuse_foreign_code(place: str, source: str, remote_code: bool) -> None:
    """Refuse a checkpoint that is unknown, or that brings code of its own, before anything large is fetched."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _config_file(place, source)
    kind = config.get("model_type")
    if remote_code or kind in CONFIG_MAPPING:
        return
    if "auto_map" in config:
        raise ValueError(
            f"{source} brings its own Python code ({kind or 'unnamed'} model), which is not run unless you ask: read it, and if you trust "
            "it pass remote_code=True (--remote-code)."
        )
    raise ValueError(f"{source} is of type {kind!r}, which this transformers does not know; upgrade transformers, or {REMEDY}.")


def _config_file(place: str, source: str) -> dict[str, Any]:
    path = Path(place) / "config.json"
    if not path.exists():
        path = _fetched(place, source)
    try:
        return json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy the model again.") from error


def _fetched(place: str, source: str) -> Path:
    """The config of a hub model: from the cache, or asked for once."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    cached = try_to_load_from_cache(place, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        HfApi().model_info(place, timeout=5)
        return Path(hf_hub_download(place, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(f"{source} is no folder here, and the hub does not give it: {_first_line(error)}; {REMEDY}.") from error
    except Exception as error:  # no network: each transport has errors of its own
        raise ValueError(
            f"{source} is no folder here, and the hub cannot be reached ({type(error).__name__}); {REMEDY}."
        ) from error


def _model_class(place: str, options: dict[str, Any]) -> Any:
    """The class that the checkpoint was saved from, else one that its type allows."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = transformers.AutoConfig.from_pretrained(place, **options)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    if named and named[0] is not None:
        return named[0]
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "is_encoder_decoder", False)
    return transformers.AutoModelForCausalLM if causal and not config.architectures else transformers.AutoModel


def _processor(place: str, options: dict[str, Any], source: str) -> Any:
    """The tokenizer or processor, None where the checkpoint has none; one that needs foreign code gives way to a plain tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    for kind in (AutoTokenizer,) if "gguf_file" in options else (AutoProcessor, AutoTokenizer):
        try:
            return kind.from_pretrained(place, **options)
        except (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError):
            continue
    if not options["trust_remote_code"] and _wants_code(place):
        raise ValueError(
            f"the tokenizer or processor of {source} is Python code of its own, which is not run unless you ask: read it, and if you "
            "trust it pass remote_code=True (--remote-code)."
        )
    return None


def _wants_code(place: str) -> bool:
    """Whether the tokenizer or processor of a checkpoint names code of its own."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        found = Path(place) / name if Path(place).is_dir() else try_to_load_from_cache(place, name)
        if isinstance(found, str | Path) and Path(found).is_file() and b'"auto_map"' in Path(found).read_bytes():
            return True
    return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _short(source: str) -> str:
    """A name to show: the hub id, or the last part of a path."""
    return source if not Path(source).exists() else Path(source).resolve().name
