"""Performer against performer-pytorch, exact attention and the floor of its own ten matrix products, on two CPU threads.

Forward and backward of one head, d=50, R=100, float32. Run as `python -m benchmarks.performer`.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.attention import Mask
from heedful.mechanisms import Performer
from heedful.ops import plain
from heedful.ops.favor import aligned

from .timing import Case, Timing, peer, table, threads, timings, write

DIM, FEATURES, THREADS = 50, 100, 2
LENGTHS = (1024, 4096, 16384)
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SCORED = 512  # tokens of the accuracy table


def main() -> None:
    warnings.filterwarnings("ignore", message="Performer's")
    other, version = peer("performer_pytorch", "performer-pytorch")
    with threads(THREADS):
        speed = {name: {length: times(other, length, causal) for length in LENGTHS} for name, causal in MODES.items()}
        accuracy = {name: {std: errors(other, std, causal) for std in SCALES} for name, causal in MODES.items()}
        for name in MODES:
            print(speed_table(name, speed[name]), end="\n\n")
        print(accuracy_table(accuracy))
        figures = {
            "setting": {
                "dim": DIM,
                "features": FEATURES,
                "batch": 1,
                "heads": 1,
                "dtype": "float32",
                "pass": "forward and backward",
            },
            "peers": {"performer-pytorch": version},
            "seconds": speed,
            "ratios": {name: {length: ratios(row) for length, row in rows.items()} for name, rows in speed.items()},
            "ratios_of_lower_quartiles": {
                name: {length: ratios(row, "low") for length, row in rows.items()} for name, rows in speed.items()
            },
            "mean_ratio_to_performer_pytorch": {name: mean_ratio(rows) for name, rows in speed.items()},
            "mean_ratio_of_lower_quartiles": {name: mean_ratio(rows, "low") for name, rows in speed.items()},
            "relative_error_to_float64_estimator": accuracy,
        }
        print(f"\nwritten: results/{write('performer', figures).name}")


MODES = {"bidirectional": False, "causal": True}


def times(other: Any, length: int, causal: bool) -> dict[str, Timing]:
    """The seconds of each way of attending at that length, in turns."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, DIM, requires_grad=True) for _ in range(3))
    grad, ours, mask = torch.randn(1, 1, length, DIM), Performer(FEATURES), Mask(causal=causal)
    theirs = fast_attention(other, causal)

    def step(attend: Any) -> Case:
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    cases = {
        "heedful": step(lambda q, k, v: ours(q, k, v, mask)),
        "performer-pytorch": step(theirs),
        "sdpa": step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)),
        "ten products": ten_products(length),
        "products, softmaxes": products_and_softmaxes(length),
    }
    return timings(cases, rounds=25, budget=40.0)


def fast_attention(other: Any, causal: bool) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints where its CUDA code is missing
        return other.FastAttention(DIM, nb_features=FEATURES, causal=causal)


def ten_products(length: int) -> Case:
    """Only the matrix products of bidirectional FAVOR+, four forward and six backward, with nothing to allocate.

    In the layouts that they have in heedful: features of queries along rows, of keys along columns.
    """
    asked, kept = feature_memory(length)
    asked, kept = asked[:, :FEATURES], kept[:, :length]
    rows, out = torch.randn(2, length, DIM)
    directions, state = torch.randn(2, FEATURES, DIM)

    def products() -> None:
        for _ in range(2):
            torch.mm(rows, directions.mT, out=asked)  # logits of the queries, gradient of their features
            torch.mm(asked, directions, out=out)  # the output, the queries' gradient
            torch.mm(directions, rows.mT, out=kept)  # logits of the keys, gradient of their features
            torch.mm(kept, rows, out=state)  # the state, its gradient
            torch.mm(kept.mT, directions, out=out)  # the values' gradient, the keys' gradient

    return products


def products_and_softmaxes(length: int) -> Case:
    """With the exponentials of both sides besides, by the fastest kernel that torch has for them: what limits any such code."""
    products, memory = ten_products(length), [torch.randn_like(t) for t in feature_memory(length)]
    found = [torch.empty_like(t) for t in memory]

    def both() -> None:
        products()
        for logits, features in zip(memory, found, strict=True):
            torch.softmax(logits, -1, out=features)

    return both


def feature_memory(length: int) -> tuple[Tensor, Tensor]:
    """For the features of queries (tokens, features) and of keys (features, tokens), with the few columns more that heedful gives them."""
    like = torch.empty(1)
    return aligned(like, length, FEATURES)[0], aligned(like, FEATURES, length)[0]


def errors(other: Any, std: float, causal: bool) -> dict[str, float]:
    """The relative distance of each output from the same estimator, same directions, in float64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, SCORED, DIM)
    q, k, mask = q * std, k * std, Mask(causal=causal)
    ours, theirs = Performer(FEATURES), fast_attention(other, causal)
    out = ours(q, k, v, mask)
    theirs.projection_matrix.copy_(ours.projection)
    with plain():
        truth = ours(q.double(), k.double(), v.double(), mask)
    mean = v.cumsum(-2) / torch.arange(1, SCORED + 1)[:, None] if causal else v.mean(-2, keepdim=True).expand_as(v)
    with torch.no_grad():
        other_out = theirs(q, k, v)
    found = {"heedful": off(out, truth), "performer-pytorch": off(other_out, truth)}
    return {name: float(f"{x:.3g}") for name, x in {**found, "performer-pytorch from mean(v)": off(other_out, mean)}.items()}


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def ratios(row: dict[str, Timing], at: str = "median") -> dict[str, float]:
    """How many times our median fits into each other one; or our lower quartile, which a busy machine disturbs less."""
    ours = getattr(row["heedful"], at)
    return {name: round(getattr(timing, at) / ours, 3) for name, timing in row.items() if name != "heedful"}


def mean_ratio(rows: dict[int, dict[str, Timing]], at: str = "median") -> float:
    """The geometric mean over the lengths."""
    return round(math.prod(ratios(row, at)["performer-pytorch"] for row in rows.values()) ** (1 / len(rows)), 2)


def speed_table(name: str, rows: dict[int, dict[str, Timing]]) -> str:
    head = [
        "L",
        *(f"{case} ms" for case in next(iter(rows.values()))),
        "x performer-pytorch",
        "x sdpa",
        "products' share",
        "with softmaxes",
    ]
    lines = []
    for length, row in rows.items():
        by_median, by_low = ratios(row), ratios(row, "low")
        ms = [f"{t.median * 1e3:.2f} ({t.low * 1e3:.2f})" for t in row.values()]
        shares = ("ten products", "products, softmaxes") if name == "bidirectional" else ()
        both = [f"{by_median[case]:.3g} ({by_low[case]:.3g})" for case in ("performer-pytorch", "sdpa", *shares)]
        lines.append([str(length), *ms, *both, *["-"] * (len(head) - 1 - len(ms) - len(both))])
    mean = f"mean x performer-pytorch: {mean_ratio(rows)} ({mean_ratio(rows, 'low')})"
    return table(f"{name}: forward and backward, d={DIM}, R={FEATURES}, medians (lower quartiles); {mean}", head, lines)


def accuracy_table(found: dict[str, dict[float, dict[str, float]]]) -> str:
    head = ["std of q, k", *(f"{mode}: {name}" for mode, rows in found.items() for name in next(iter(rows.values())))]
    lines = [[str(std), *(f"{x:.1e}" for rows in found.values() for x in rows[std].values())] for std in SCALES]
    return table(f"relative distance from the float64 estimator with the same directions, {SCORED} tokens", head, lines)


if __name__ == "__main__":
    main()
