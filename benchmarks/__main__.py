"""Run every benchmark of this folder in turn, or those named: python -m benchmarks [performer ...]."""

import importlib
import sys
from pathlib import Path

HELPERS = {"__init__", "__main__", "timing", "real", "tables"}
here = Path(__file__).parent
names = sys.argv[1:] or sorted(path.stem for path in here.glob("*.py") if path.stem not in HELPERS)
for name in names:
    print(f"# {name}", flush=True)
    importlib.import_module(f"benchmarks.{name}").main()
