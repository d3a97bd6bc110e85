"""About: where findings come from, so that they can be trusted, added and repeated."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True)
class Layer:
    """The shape of one attention layer and the rules of its mask."""

    heads: int
    key_heads: int
    dim: int  # of q and k
    width: int  # of v
    rules: tuple[str, ...] = ()  # causal, window, keys ...
    cross: bool = False  # whether its keys come from another sequence

    def __or__(self, other: Layer) -> Layer:
        """The same layer in two calls."""
        return dataclasses.replace(self, rules=tuple(sorted({*self.rules, *other.rules})), cross=self.cross or other.cross)


@dataclass(frozen=True)
class About:
    """The model, what it read and how it was looked at; adding findings adds the counts."""

    model: str
    fingerprint: str  # of the weights and the configuration
    texts: int = 0
    tokens: int = 0
    truncated: int = 0  # texts that were longer than the model or the scan allows
    length: int | None = None  # tokens after which texts were cut
    longest: int = 0  # tokens of the longest text that was read
    rows: int | None = None  # query rows looked at in each text, None for all
    seed: int = 0
    layers: dict[str, Layer] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)  # attention modules that were not seen, and why
    versions: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: About) -> About:
        if self.fingerprint != other.fingerprint:
            raise ValueError(
                f"these findings are of two models, {self.model} ({self.fingerprint[:8]}) and {other.model} ({other.fingerprint[:8]}); "
                "add findings of one model with the same weights."
            )
        merged = {name: one | other.layers[name] if name in other.layers else one for name, one in self.layers.items()}
        return dataclasses.replace(
            self,
            texts=self.texts + other.texts,
            tokens=self.tokens + other.tokens,
            truncated=self.truncated + other.truncated,
            length=_longest(self.length, other.length),
            longest=max(self.longest, other.longest),
            rows=None if self.rows is None and other.rows is None else min(r for r in (self.rows, other.rows) if r is not None),
            layers={**other.layers, **merged},
            missed={name: why for name, why in self.missed.items() if name in other.missed},
            versions={**other.versions, **self.versions},
        )

    @property
    def data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> About:
        """The inverse of `data`."""
        layers = {name: Layer(**{**one, "rules": tuple(one["rules"])}) for name, one in data["layers"].items()}
        return cls(**{**data, "layers": layers})


def versions() -> dict[str, str]:
    """The versions that figures depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in ("heedful", "torch", "transformers")}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _longest(a: int | None, b: int | None) -> int | None:
    known = [x for x in (a, b) if x is not None]
    return max(known) if known else None
