"""The statistics: one streamed quantity per file, and this list of them."""

from __future__ import annotations

from ..statistic import Estimate, Statistic, TokenMean
from .concentration import Concentration
from .distance import Distance
from .entropy import Entropy, Evenness
from .growth import Growth
from .load import Load
from .locality import Locality
from .logit import LargestLogit
from .moments import Moments
from .peak import Peak
from .residual import Residual
from .sensitivity import KeySensitivity, QuerySensitivity, ValueSensitivity
from .sink import Sink
from .spectrum import Spectrum

ALL: tuple[type[Statistic], ...] = (
    Entropy,
    Evenness,
    Peak,
    Concentration,
    Sink,
    Distance,
    Locality,
    Load,
    LargestLogit,
    ValueSensitivity,
    KeySensitivity,
    QuerySensitivity,
    Spectrum,
    Moments,
)
BY_NAME: dict[str, type[Statistic]] = {s.__name__: s for s in (*ALL, Residual)}
MEANING: dict[str, str] = {name: meaning for s in BY_NAME.values() for name, meaning in s.columns.items()}

__all__ = [
    "ALL",
    "BY_NAME",
    "MEANING",
    "Concentration",
    "Distance",
    "Entropy",
    "Estimate",
    "Evenness",
    "Growth",
    "KeySensitivity",
    "LargestLogit",
    "Load",
    "Locality",
    "Moments",
    "Peak",
    "QuerySensitivity",
    "Residual",
    "Sink",
    "Spectrum",
    "Statistic",
    "TokenMean",
    "ValueSensitivity",
]
