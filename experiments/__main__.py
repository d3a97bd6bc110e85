"""Run the experiments of this folder, or those named: python -m experiments [s004_features ...] [--size tiny|small|full]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.timing import threads

from .running import SIZES, names, run

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m experiments", description="Claims of the sources, measured.")
    asked.add_argument("name", nargs="*", choices=[[], *names()], help="which ones (all unless named)")
    asked.add_argument("--size", choices=SIZES, default="small")
    given = asked.parse_args()
    with threads(1):
        verdicts = [run(name, given.size, RESULTS) for name in given.name or names()]
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
