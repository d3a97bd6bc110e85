"""A transformer is the sum of (H + 1)^L paths, and what they add falls with their length.

Source 001, theorem 2.1 with "dummy heads, aka, skip layers, the cardinality should be (H+1)^L", carried over from attention alone to whole
models: attention weights, norms' 1 / sigma and GELU gates held as they were. An MLP lets paths through with its gate ("gate"), or what
it makes starts paths of its own ("source"): both are exact and tell different stories.
Expected: streams add up to the output to 1e-12 in float64. theory.md's Frobenius norms by length 0 to 6 on MiniLM, for about 100 tokens
of another text: gate 35.5 27.4 12.2 5.67 3.0 1.06 .19, source 21.7 13.3 7.8 4.6 2.95 1.28 .27.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heedful.exact import path_streams

from .drawing import COLOURS, figure
from .networks import minilm_frozen, random_network

VERDICT = (
    "holds if attention weights, norms and gates are held as they were; how much falls to which length depends on whether paths go "
    "through MLPs (gate) or start there (source)"
)
ERRATA = ()
SIZES = {
    "tiny": {"layers": 3, "heads": 2, "dim": 8, "tokens": 6},
    "small": {"tokens": 96},
    "full": {"tokens": 256},
}
WAYS = ("gate", "source")


def measure(size: str) -> dict[str, Any]:
    """By way through MLPs: norms and shares of the streams by length, and the error of their sum; tiny is a random attention network."""
    setting: Any = SIZES[size]
    network = random_network(0, **setting) if size == "tiny" else minilm_frozen(setting["tokens"])[1]
    paths = (network.layers[0].heads.w_v.shape[0] + 1) ** len(network.layers)
    found: dict[str, Any] = {}
    for way in WAYS:
        streams = path_streams(network, way)  # type: ignore[arg-type]
        found[way] = {
            "norms": streams.norms()[0].tolist(),
            "made": float(streams.made.norm()),
            "bias": float(streams.bias.norm()),
            "shares": streams.shares()[0].tolist(),
            "error": float((streams.total - network.output).norm() / network.output.norm()),
        }
    return {**setting, "paths": paths, "real": size != "tiny", "output": float(network.output.norm()), "found": found}


def holds(numbers: dict[str, Any]) -> bool:
    """Both sums are exact; in MiniLM norms fall with each hop, and less comes straight from the embedding where MLPs are sources."""
    gate, source = (numbers["found"][way] for way in WAYS)
    exact = max(gate["error"], source["error"]) < 1e-12
    if not numbers["real"]:
        return exact
    falling = all(a > b for one in (gate, source) for a, b in zip(one["norms"], one["norms"][1:], strict=False))
    return exact and falling and source["norms"][0] < 0.8 * gate["norms"][0]


def figure_of(numbers: dict[str, Any]) -> str:
    """Our figure in one line."""
    shown = [f"{way} {' '.join(f'{x:.3g}' for x in numbers['found'][way]['norms'])}" for way in WAYS]
    error = max(one["error"] for one in numbers["found"].values())
    return f"{numbers['paths']:,} paths, norms by length: {'; '.join(shown)}; sum off by {error:.0e}"


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for way, colour in zip(WAYS, COLOURS, strict=False):
            one = numbers["found"][way]
            axes.semilogy(
                range(len(one["norms"])), one["norms"], "-o", color=colour, label=f"{way}: from the embedding", markersize=4
            )
            axes.axhline(one["bias"], color=colour, ls=":", label=f"{way}: from biases")
            if one["made"]:
                axes.axhline(one["made"], color=colour, ls="--", label=f"{way}: from MLPs")
        axes.set_xlabel("heads on the path")
        axes.set_ylabel("Frobenius norm of the stream")
        axes.set_title(f"{'MiniLM' if numbers['real'] else 'random attention'}, {numbers['tokens']} tokens", fontsize=10)
        axes.legend(fontsize=8)
