"""Run the experiments of this folder, or those named: python -m experiments [s004_features ...] [--size tiny|small|full] [--ledger].

Sizes small and full write experiments/results and the ledger; tiny, a try-out, writes out/experiments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.timing import threads

from . import ledger
from .running import SIZES, names, run

TINY = Path("out") / "experiments"  # a try-out of seconds, which the ledger does not keep


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m experiments", description="Claims of the sources, measured.")
    asked.add_argument("name", nargs="*", choices=[[], *names()], help="which ones (all unless named)")
    asked.add_argument("--size", choices=SIZES, default="small")
    asked.add_argument("--ledger", action="store_true", help="only write docs/claims.md from the results that are there")
    given = asked.parse_args()
    confirmed = True
    if not given.ledger:
        folder = ledger.RESULTS if given.size != "tiny" else TINY
        folder.mkdir(parents=True, exist_ok=True)
        with threads(1):
            verdicts = [run(name, given.size, folder) for name in given.name or names()]
        confirmed = all(verdicts)
    if given.ledger or given.size != "tiny":
        page = ledger.write()
        print(f"written: {page.parent.name}/{page.name}")
    sys.exit(not confirmed)


if __name__ == "__main__":
    main()
