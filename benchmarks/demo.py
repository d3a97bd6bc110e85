"""What the demo says of its model, kept for README. Run as `python -m benchmarks.demo`."""

from __future__ import annotations

import heedful as hd
from heedful.demo import texts

from .real import minilm
from .timing import write


def main() -> None:
    found = hd.scan(minilm(), texts(), rows=None)
    about = found.about
    counts = {"texts": about.texts, "tokens": about.tokens, "layers": len(found.layers)}
    print(*found.verdicts(), sep="\n")
    print(f"\nwritten: results/{write('demo', {**counts, 'verdicts': found.verdicts()}).name}")


if __name__ == "__main__":
    main()
