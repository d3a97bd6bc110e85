"""Findings: what a scan found, as statistics by layer that save, load and add up."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .about import About
from .files import write
from .statistics import BY_NAME, MEANING, Estimate, Statistic
from .verdicts import verdicts

if TYPE_CHECKING:
    import pandas

SCHEMA = 3
FILE = "findings.safetensors"


@dataclass(frozen=True, eq=False)
class Findings:
    """Statistics by layer, and of the hidden states by depth; `+` adds the findings of other texts or machines."""

    about: About
    layers: dict[str, dict[str, Statistic]] = field(default_factory=dict)
    depths: dict[str, Statistic] = field(default_factory=dict)

    def __add__(self, other: Findings) -> Findings:
        about = self.about + other.about
        names = sorted({*self.layers, *other.layers}, key=[*self.layers, *other.layers].index)
        layers = {name: _added(self.layers.get(name, {}), other.layers.get(name, {})) for name in names}
        return Findings(about, layers, _added(self.depths, other.depths))

    def results(self) -> dict[str, dict[str, Estimate]]:
        """By layer and by column (`heedful.statistics.MEANING` says what each means), a value and an error per head."""
        return {layer: _results(found.values()) for layer, found in self.layers.items()}

    def column(self, name: str) -> dict[str, Tensor]:
        """One column by layer, a value per head."""
        if name not in MEANING:
            raise ValueError(f"there is no column {name!r}; known are {', '.join(MEANING)}.")
        return {layer: found[name].value for layer, found in self.results().items() if name in found}

    def rows(self) -> Iterator[dict[str, Any]]:
        """One flat row for each head: layer, head, and every column with its error where rows were sampled."""
        for layer, found in self.results().items():
            for head in range(self.about.layers[layer].heads):
                row: dict[str, Any] = {"layer": layer, "head": head}
                for name, (value, error) in found.items():
                    row[name] = value[head].item()
                    row[f"{name}_error"] = error[head].item()
                yield row

    def by_depth(self) -> Iterator[dict[str, Any]]:
        """One flat row for each depth at which hidden states were looked at."""
        for depth, found in self.depths.items():
            yield {"depth": depth, **{name: e.value.item() for name, e in found.result().items()}}

    def verdicts(self) -> list[str]:
        """What the numbers say, in sentences that carry them."""
        return verdicts(self)

    def to_csv(self) -> str:
        """The rows as CSV text."""
        return _csv(list(self.rows()))

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas. to_csv and rows do without it.") from error
        return pandas.DataFrame(list(self.rows()))

    def save(self, folder: str | Path, **extra: Any) -> Path:
        """Write findings.safetensors, which loads again, and for reading findings.json, heads.csv, depths.csv and verdicts.txt."""
        folder = Path(folder)
        write(folder / FILE, self.to_bytes(**extra))
        readable = {"about": self.about.data, "meaning": MEANING, "heads": list(self.rows()), "depths": list(self.by_depth())}
        write(folder / "findings.json", json.dumps(_finite(readable), indent=1))
        write(folder / "heads.csv", self.to_csv())
        write(folder / "depths.csv", _csv(list(self.by_depth())))
        write(folder / "verdicts.txt", "\n".join(self.verdicts()) + "\n")
        return folder

    def to_bytes(self, **extra: Any) -> bytes:
        """A safetensors file of every sum, with `about` and `extra` in its header."""
        places = {"layer": self.layers, "depth": {name: {type(s).__name__: s} for name, s in self.depths.items()}}
        tensors = {
            "/".join((kind, place, name, part)): tensor.cpu().contiguous()
            for kind, there in places.items()
            for place, found in there.items()
            for name, statistic in found.items()
            for part, tensor in statistic.tensors.items()
        }
        order = {"layers": list(self.layers), "depths": list(self.depths)}
        header = {"schema": SCHEMA, "about": self.about.data, **order, **extra}
        return save(tensors, {"heedful": json.dumps({**header, "sum": _digest(header, tensors)})})

    @classmethod
    def load(cls, path: str | Path) -> Findings:
        """Read findings back from their folder or file."""
        path = Path(path)
        return cls.read(path / FILE if path.is_dir() else path)[0]

    @classmethod
    def read(cls, path: Path) -> tuple[Findings, dict[str, Any]]:
        """The findings of a file and its header."""
        if not path.exists():
            raise FileNotFoundError(f"there are no findings at {path}; give the folder that `heedful scan` wrote.")
        header, tensors = _opened(path)
        try:
            return cls._rebuilt(header, tensors), header
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error!r} in its header; scan again, or load another copy.") from error

    @classmethod
    def _rebuilt(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Findings:
        parts: dict[tuple[str, str, str], dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, place, name, part = key.split("/")
            parts.setdefault((kind, place, name), {})[part] = tensor
        layers: dict[str, dict[str, Statistic]] = {name: {} for name in header["layers"]}
        depths: dict[str, Statistic] = {}
        found = {key: _known(key[2])(**held) for key, held in parts.items()}
        for name in BY_NAME:  # the order of the list, whatever the file's
            layers_with = {layer: found["layer", layer, name] for layer in layers if ("layer", layer, name) in found}
            for layer, statistic in layers_with.items():
                layers[layer][name] = statistic
            depths |= {d: found["depth", d, name] for d in header["depths"] if ("depth", d, name) in found}
        return cls(About.of_data(header["about"]), layers, depths)


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file, once their checksum is right."""
    try:
        with safe_open(str(path), "pt") as file:
            header = json.loads((file.metadata() or {}).get("heedful", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a findings file ({error}); scan again, or load another copy.") from error
    if not isinstance(header, dict) or "schema" not in header:
        raise ValueError(f"{path} is a safetensors file without findings; give one that `heedful scan` wrote.")
    if header["schema"] != SCHEMA and header["schema"] in range(100):
        age = "a newer" if header["schema"] > SCHEMA else "an older"
        raise ValueError(
            f"{path} was written by {age} heedful (schema {header['schema']}, here {SCHEMA}); load it with that one, or scan again."
        )
    if header.pop("sum", None) != _digest(header, tensors):
        raise ValueError(f"{path} is damaged: its content does not match its checksum; scan again, or load another copy.")
    return header, tensors


def _known(name: str) -> type[Statistic]:
    if name not in BY_NAME:
        raise ValueError(
            f"these findings hold a statistic {name!r} that is not listed in heedful.statistics; list it, then load again."
        )
    return BY_NAME[name]


def _added(mine: dict[str, Statistic], theirs: dict[str, Statistic]) -> dict[str, Statistic]:
    return {**theirs, **{name: s + theirs[name] if name in theirs else s for name, s in mine.items()}}


def _results(found: Iterable[Statistic]) -> dict[str, Estimate]:
    return {name: estimate for statistic in found for name, estimate in statistic.result().items()}


def _digest(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A checksum of all that a file holds, the header as JSON gives it back."""
    whole = hashlib.sha256(json.dumps(json.loads(json.dumps(header)), sort_keys=True).encode())
    for name in sorted(tensors):
        whole.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        whole.update(tensors[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def _csv(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _finite(data: Any) -> Any:
    """JSON has no nan or inf: they become null and a string."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if isinstance(data, float) and (data != data or abs(data) == float("inf")):
        return None if data != data else str(data)
    return data
