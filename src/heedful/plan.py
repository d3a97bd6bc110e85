"""Plan: what shall change in a model, layer by layer, as readable data that is checked before anything changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .files import write

SCHEMA = 1
FILE = "plan.json"
Dims = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Resize:
    """New sizes of a layer: dims of q.k and of v, one number for all key heads or one for each; None leaves them.

    `pairs` names the frequency pairs that each key head of a rotary layer keeps; where it is left out, the data choose. `heads` is how
    many query heads there are, where some were added behind those that were.
    """

    qk: Dims = None
    v: Dims = None
    pairs: tuple[tuple[int, ...], ...] | None = None
    heads: int | None = None

    def key_heads(self, native: Native) -> int:
        """How many key heads a layer has then."""
        return native.key_heads if self.heads is None else self.heads * native.key_heads // native.heads


@dataclass(frozen=True)
class Native:
    """What a layer was when its plan was made: query heads, key heads, dims of q.k and of v, frequency pairs (None: it does not turn)."""

    heads: int
    key_heads: int
    qk: int
    v: int
    pairs: int | None = None


@dataclass(frozen=True)
class Plan:
    """Changes by layer, and the layers of the model that they are for.

    >>> plan = Plan({"encoder.layer.0.attention.self": Resize(qk=24)})
    >>> Plan.of_json(plan.to_json()) == plan
    True
    """

    layers: Mapping[str, Resize]
    natives: Mapping[str, Native] = field(default_factory=dict)  # of all layers of its model, once it is known
    model: str | None = None  # its model_type

    def check(self, natives: Mapping[str, Native], model: str | None = None) -> None:
        """Refuse the plan for a model whose layers are not those it is for, or sizes that cannot be."""
        if self.model is not None and model is not None and self.model != model:
            raise ValueError(f"this plan is for another model ({self.model}, not {model}); make one for this model.")
        for name in self.layers:
            if name not in natives:
                near = get_close_matches(name, natives, 2, 0.4) or list(natives)[:2]
                raise ValueError(
                    f"this plan is for another model: there is no attention layer {name!r} here; did you mean {' or '.join(near)}?"
                )
            said = self.natives.get(name, natives[name])
            if said != natives[name]:
                raise ValueError(f"this plan is for another model: {name} was {said} there and is {natives[name]} here.")
        for name, change in self.layers.items():
            _possible(name, change, natives[name])

    def __or__(self, later: Plan) -> Plan:
        """This plan with a later one on top."""
        merged = dict(self.layers)
        for name, change in later.layers.items():
            former = merged.get(name, Resize())
            merged[name] = Resize(
                former.qk if change.qk is None else change.qk,
                former.v if change.v is None else change.v,
                former.pairs if change.pairs is None else change.pairs,
                former.heads if change.heads is None else change.heads,
            )
        return Plan(merged, {**later.natives, **self.natives}, self.model or later.model)

    def to_json(self) -> str:
        """Readable, editable, diffable."""
        layers = {name: {"resize": _without_none(asdict(change))} for name, change in self.layers.items()}
        natives = {name: _without_none(asdict(native)) for name, native in self.natives.items()}
        lines = {"schema": SCHEMA, "model": self.model, "layers": layers, "natives": natives}
        return _lines(lines)

    @classmethod
    def of_json(cls, text: str, where: str = "the plan") -> Plan:
        """The inverse of `to_json`; errors name what is wrong in the file."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError(
                    f"{where} has schema {data['schema']}, this heedful reads {SCHEMA}; use the heedful that wrote it."
                )
            layers = {name: _resize(name, one["resize"]) for name, one in data["layers"].items()}
            natives = {name: Native(**one) for name, one in data.get("natives", {}).items()}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is damaged or no plan ({error!r}); it needs schema, layers and, in each, resize.") from error
        return cls(layers, natives, data.get("model"))

    def save(self, path: str | Path) -> Path:
        """Write it whole or not at all."""
        return write(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its file, or from the folder of a checkpoint that holds one."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        if not path.exists():
            raise FileNotFoundError(f"there is no plan at {path}; give the file or folder that was saved.")
        try:
            return cls.of_json(path.read_text("utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged ({error}); copy it again.") from error


def each(dims: int | tuple[int, ...], heads: int) -> tuple[int, ...]:
    """One number for each key head."""
    return (dims,) * heads if isinstance(dims, int) else tuple(dims)


def _possible(name: str, change: Resize, native: Native) -> None:
    group, count = native.heads // native.key_heads, change.key_heads(native)
    if change.heads is not None and (change.heads < native.heads or change.heads % group):
        raise ValueError(
            f"{name}: heads is {change.heads}; it had {native.heads}, {group} to a key head: give that or more, by {group}."
        )
    for word, dims in (("qk", change.qk), ("v", change.v)):
        if dims is None:
            continue
        if not isinstance(dims, int) and len(dims) != count:
            raise ValueError(f"{name}: {word} has {len(dims)} sizes, but there are {count} key heads; give one number for each.")
        wrong = [d for d in each(dims, count) if isinstance(d, bool) or not isinstance(d, int) or d < 1]
        if wrong:
            raise ValueError(f"{name}: {word} is {wrong[0]!r}; a head has at least 1 dim.")
    if change.pairs is not None:
        _possible_pairs(name, change, native)


def _possible_pairs(name: str, change: Resize, native: Native) -> None:
    pairs = change.pairs or ()
    if native.pairs is None or len(pairs) != change.key_heads(native):
        raise ValueError(f"{name}: pairs are given for {len(pairs)} heads; a rotary layer needs them for each of its key heads.")
    for kept, dims in zip(pairs, each(change.qk or native.qk, change.key_heads(native)), strict=True):
        if list(kept) != sorted(set(kept)) or not all(0 <= p < native.pairs for p in kept) or 2 * len(kept) > dims:
            raise ValueError(
                f"{name}: pairs {list(kept)} of a head with {dims} dims; each pair takes 2 of them and is one of 0 to {native.pairs - 1}, "
                "in rising order."
            )


def _resize(name: str, data: dict[str, Any]) -> Resize:
    unknown = sorted(data.keys() - {"qk", "v", "pairs", "heads"})
    if unknown:
        raise ValueError(f"{name} has {unknown[0]!r} in its resize; known are qk, v, pairs and heads.")
    pairs = data.get("pairs")
    return Resize(
        _dims(data.get("qk")),
        _dims(data.get("v")),
        None if pairs is None else tuple(tuple(kept) for kept in pairs),
        data.get("heads"),
    )


def _dims(value: Any) -> Dims:
    return tuple(value) if isinstance(value, list) else value


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _lines(data: dict[str, Any]) -> str:
    """JSON with one line for each layer."""
    parts = []
    for name, value in data.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"    {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
            parts.append(f"  {json.dumps(name)}: {{\n{inner}\n  }}")
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
