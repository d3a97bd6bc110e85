"""Rules: how many dims each head keeps, from what each of its dims is worth; one way of choosing per file."""

from .budget import Budget
from .ladder import Ladder, Rule
from .tolerance import Tolerance
from .uniform import Uniform

__all__ = ["Budget", "Ladder", "Rule", "Tolerance", "Uniform"]
