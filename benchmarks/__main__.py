"""Run every benchmark of this folder in turn, or those named: python -m benchmarks [performer ...]."""

import importlib
import sys
from pathlib import Path

HELPERS = {"__init__", "__main__", "timing", "real", "tables"}


def main(names: list[str]) -> int:
    """Run the named benchmarks, all without names; those that lack data or a package are listed at the end, and give 1."""
    here = Path(__file__).parent
    skipped: dict[str, str] = {}
    for name in names or sorted(path.stem for path in here.glob("*.py") if path.stem not in HELPERS):
        print(f"# {name}", flush=True)
        try:
            importlib.import_module(f"benchmarks.{name}").main()
        except SystemExit as missing:
            if missing.code not in (None, 0):
                skipped[name] = str(missing.code)
    for name, why in skipped.items():
        print(f"skipped {name}: {why}", file=sys.stderr)
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
