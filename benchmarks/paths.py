"""Path streams against reading alone: MiniLM and SmolLM2 on wikitext2, seconds over one forward pass, and how exactly the streams add up.

`apart` is a forward pass whose blocks are taken apart and confirmed, `freeze` works out 1 / sigma and gates; `gate` and `source` are the
streams by length, `attribute` the shares of all lengths, biases and heads. A BERT block multiplies 12 d^2 times a token; a stream costs 2 d^2
in its attention and 8 d^2 in its MLP. MiniLM's 6 layers take 27 and, with "gate", 33 of them: 318 d^2 or 4.4 forward passes; with "source"
66 and 48 d^2, or 1.6. `attribute` takes 166 d^2 or 2.3. Run as `python -m benchmarks.paths`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import heedful as hd
from heedful.exact import Network, attribute, path_streams
from heedful.explaining.paths import frozen
from heedful.huggingface.apart import Apart, take_apart

from .real import data, minilm, smollm2
from .timing import Timing, table, threads, timings, write

THREADS, DTYPE, EXACT = 2, torch.float32, torch.float64


@dataclass(frozen=True)
class Subject:
    """Lengths of texts, and the longest paths that have a stream of their own."""

    lengths: tuple[int, ...]
    max_length: int | None


SUBJECTS = {"MiniLM": (minilm, Subject((16, 32, 64, 128, 256), None)), "SmolLM2-135M": (smollm2, Subject((128,), 6))}


def main() -> None:
    found: dict[str, Any] = {}
    with threads(THREADS):
        for name, (load, subject) in SUBJECTS.items():
            found[name] = {tokens: measure(load(), subject, tokens) for tokens in subject.lengths}
            print(shown(name, found[name]), end="\n\n", flush=True)
    print(f"written: results/{write('paths', {'dtype': str(DTYPE), 'models': found}).name}")


def measure(checkpoint: hd.Checkpoint, subject: Subject, tokens: int) -> dict[str, Any]:
    """Ratios to a forward pass, streams sent through attention and errors of the sum, for one text of so many tokens."""
    model, ids = checkpoint.model, ids_of(checkpoint, tokens)
    apart, network = pieces(model, ids)
    cases = {
        "forward": lambda: forward(model, ids),
        "apart": lambda: take_apart(model, lambda: forward(model, ids)),
        "freeze": lambda: frozen(apart),
        "gate": lambda: path_streams(network, "gate", subject.max_length),
        "source": lambda: path_streams(network, "source", subject.max_length),
        "attribute": lambda: attribute(network),
    }
    seconds = timings(cases, rounds=9, budget=12.0)
    ratios = {name: round(one.median / seconds["forward"].median, 3) for name, one in seconds.items()}
    errors = {"float32": errors_of(network, subject.max_length)}
    _, exact = pieces(model.to(EXACT), ids)
    errors["float64"] = errors_of(exact, subject.max_length)
    passes = {mlp: path_streams(network, mlp, subject.max_length).passes for mlp in ("gate", "source")}
    return {"seconds": seconds, "over_forward": ratios, "passes": passes, "errors": errors, "max_length": subject.max_length}


def ids_of(checkpoint: hd.Checkpoint, tokens: int) -> Tensor:
    text = data("wikitext2/test.txt").read_text("utf-8")[: 12 * tokens]
    return checkpoint.tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]


def pieces(model: nn.Module, ids: Tensor) -> tuple[Apart, Network]:
    apart = take_apart(model, lambda: forward(model, ids))
    return apart, frozen(apart)


def forward(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.base_model(ids).last_hidden_state  # type: ignore[operator]


def errors_of(network: Network, max_length: int | None) -> dict[str, float]:
    """|sum of streams - output| / |output|."""
    found = {}
    for mlp in ("gate", "source"):
        total = path_streams(network, mlp, max_length).total
        found[mlp] = float((total - network.output).norm() / network.output.norm())
    return found


def shown(name: str, found: dict[int, dict[str, Any]]) -> str:
    head = ["L", "forward ms", "apart", "freeze", "gate", "source", "attribute", "error float32", "float64"]
    lines = []
    for tokens, row in found.items():
        first: Timing = row["seconds"]["forward"]
        ratios = [f"{row['over_forward'][case]:.2f}" for case in head[2:7]]
        errors = [f"{max(row['errors'][kind].values()):.0e}" for kind in ("float32", "float64")]
        lines.append([str(tokens), f"{first.median * 1e3:.1f}", *ratios, *errors])
    return table(f"{name}: times a forward pass, one text, {THREADS} threads", head, lines)


if __name__ == "__main__":
    main()
