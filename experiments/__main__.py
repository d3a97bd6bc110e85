"""Run the experiments of this folder, or those named: python -m experiments [s004_features ...] [--size tiny|small|full] [--ledger]."""

from __future__ import annotations

import argparse
import sys

from benchmarks.timing import threads

from . import ledger
from .running import SIZES, names, run


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m experiments", description="Claims of the sources, measured.")
    asked.add_argument("name", nargs="*", choices=[[], *names()], help="which ones (all unless named)")
    asked.add_argument("--size", choices=SIZES, default="small")
    asked.add_argument("--ledger", action="store_true", help="only write docs/claims.md from the results that are there")
    given = asked.parse_args()
    confirmed = True
    if not given.ledger:
        with threads(1):
            verdicts = [run(name, given.size, ledger.RESULTS) for name in given.name or names()]
        confirmed = all(verdicts)
    page = ledger.write()
    print(f"written: {page.parent.name}/{page.name}")
    sys.exit(not confirmed)


if __name__ == "__main__":
    main()
