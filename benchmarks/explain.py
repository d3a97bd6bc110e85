"""What `heedful explain` says of one text and how long it takes, kept for README. Run as `python -m benchmarks.explain`."""

from __future__ import annotations

import time

from heedful import explain
from heedful.demo import texts
from heedful.explanations import WAYS

from .real import minilm, smollm2
from .timing import threads, write

TOKENS, THREADS = 128, 1


def main() -> None:
    found = {}
    with threads(THREADS):
        for model in (minilm(), smollm2()):
            found[model.name] = {}
            for what in WAYS:
                start = time.perf_counter()
                answer = explain(model, texts()[-1], what, length=TOKENS)
                seconds = time.perf_counter() - start
                found[model.name][what] = {"seconds": round(seconds, 2), "sentences": answer.sentences}
                print(f"# {model.name}, {what}: {seconds:.1f} s", *answer.sentences, sep="\n")
    print(f"\nwritten: results/{write('explain', {'tokens': TOKENS, 'threads': THREADS, 'models': found}).name}")


if __name__ == "__main__":
    main()
