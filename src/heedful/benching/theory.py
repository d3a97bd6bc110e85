"""Theory: the powers of the length that time and memory grow with by design, and how many operations wait for one another.

Numbers of features, buckets, landmarks and clusters are held fixed; factors of the dimension are left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """The cost of one layer for n tokens."""

    time: float  # power of n; a logarithm counts nothing
    sequential: str  # operations that wait for one another
    said: str  # as papers write the time


THEORY = {
    "Recurrent": Growth(1.0, "n", "n"),
    "Softmax": Growth(2.0, "1", "n^2"),
    "Hard": Growth(2.0, "1", "n^2"),
    "TopK": Growth(2.0, "1", "n^2"),
    "Sparse": Growth(1.5, "1", "n sqrt n"),
    "Reformer": Growth(1.0, "log n", "n log n"),
    "Linformer": Growth(1.0, "1", "n"),
    "Performer": Growth(1.0, "1", "n"),
    "FittedPerformer": Growth(1.0, "1", "n"),
    "Linear": Growth(1.0, "1", "n"),
    "Local": Growth(1.0, "1", "n"),
    "Nystrom": Growth(1.0, "1", "n"),
    "Clustered": Growth(1.0, "1", "n"),
    "Landmarks": Growth(1.0, "1", "n"),
}
SEQUENTIAL = {name: growth.sequential for name, growth in THEORY.items()}
