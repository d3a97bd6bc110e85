"""Jacobians of attention layers in closed form against torch.func, products with them against a forward pass, Lipschitz constants.

Each product is timed twice: near a point that is known (`Derivative` made once, as Lanczos uses it) and from the weights alone, as
torch.func's are. The forward pass is the layer spelled out in torch. One CPU thread. Run as `python -m benchmarks.jacobian`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.exact import Derivative, Layer, attention_jacobian, attention_jvp, attention_vjp, local_lipschitz

from .real import data, minilm
from .timing import Timing, peak_memory, table, threads, timings, write

FULL = ((64, 32, 1), (128, 32, 4), (128, 64, 4))  # tokens, dim, heads
PRODUCTS = ((128, 64, 4), (512, 384, 12), (1024, 384, 12), (2048, 384, 12))
CHUNK = 256  # cotangents that jacrev takes at once, where it is told to
LAYERS, SHORT, LONG = (0, 2, 5), 64, 4096


def main() -> None:
    with threads(1):
        full = {f"{n}, {d}, {h}": jacobians(n, d, h) for n, d, h in FULL}
        products = {f"{n}, {d}, {h}": moves(n, d, h) for n, d, h in PRODUCTS}
        lipschitz = stretches()
    ratios = {size: over("closed form", row, inverse=True) for size, row in full.items()}
    shares = {size: over("forward", row) for size, row in products.items()}
    pairs = {size: pair(row) for size, row in products.items()}
    print(shown(full, ratios, shares, pairs, lipschitz))
    found = {"jacobian_seconds": full, "jacobian_ratios": ratios, "product_seconds": products, "products_over_forward": shares}
    found |= {"pair_ratios": pairs, "lipschitz": lipschitz}
    print(f"\nwritten: results/{write('jacobian', found).name}")


def drawn(n: int, d: int, heads: int) -> tuple[Tensor, Layer, Callable[[Tensor], Tensor]]:
    """Tokens, a layer with random weights, and the same layer spelled out."""
    torch.manual_seed(0)
    x, weights = torch.randn(n, d), torch.randn(4, d, d) / d**0.5
    scale = (d // heads) ** -0.5

    def spelled(x: Tensor) -> Tensor:
        q, k, v = ((x @ w).view(n, heads, -1).transpose(0, 1) for w in weights[:3])
        return ((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1).flatten(1) @ weights[3]

    return x, Layer(*weights, heads=heads), spelled


def jacobians(n: int, d: int, heads: int) -> dict[str, Timing]:
    x, layer, spelled = drawn(n, d, heads)
    cases = {
        "closed form": lambda: attention_jacobian(x, layer),
        "jacrev": lambda: torch.func.jacrev(spelled)(x),
        f"jacrev, chunks of {CHUNK}": lambda: torch.func.jacrev(spelled, chunk_size=CHUNK)(x),
    }
    return timings(cases, rounds=5, budget=20.0)


def moves(n: int, d: int, heads: int) -> dict[str, Timing]:
    x, layer, spelled = drawn(n, d, heads)
    dx, grad = torch.randn(x.shape), torch.randn(x.shape)
    near = Derivative(x, layer)
    cases = {
        "forward": torch.no_grad()(lambda: spelled(x)),
        "forward, fused": torch.no_grad()(lambda: layer(x)),
        "JVP": lambda: near.push(dx),
        "VJP": lambda: near.pull(grad),
        "JVP from weights": lambda: attention_jvp(x, dx, layer),
        "VJP from weights": lambda: attention_vjp(x, grad, layer),
        "torch.func.jvp": lambda: torch.func.jvp(spelled, (x,), (dx,)),
        "torch.func.vjp": lambda: torch.func.vjp(spelled, x)[1](grad),
    }
    return timings(cases, rounds=9, budget=20.0)


def stretches() -> dict[str, Any]:
    """Of MiniLM's layers at what they read: one text, and as many tokens as LONG says."""
    (brief, layers), (states, _) = read(SHORT, SHORT), read(LONG, 512)
    found: dict[str, Any] = {}
    for number in LAYERS:
        short = local_lipschitz(brief[number], layers[number])
        found[f"layer {number}, {SHORT} tokens"] = {"value": short.value, "error": short.error, "iterations": short.iterations}
    x, layer, kept = states[2], layers[2], []
    taken = timings({"once": lambda: kept.append(local_lipschitz(x, layer))}, rounds=1, least=1)["once"]
    memory, last = peak_memory(lambda: local_lipschitz(x, layer, iterations=2)), kept[-1]
    vectors = last.iterations * x.numel() * x.element_size()  # the right vectors that are kept
    dense = layer.heads * LONG**2 * x.element_size()
    found[f"layer 2, {LONG} tokens"] = {
        "value": last.value,
        "error": last.error,
        "iterations": last.iterations,
        "seconds": taken.median,
        "bytes_of_two_iterations": memory,
        "bytes_of_vectors": vectors,
        "bytes_of_dense_probabilities": dense,
    }
    return found


@torch.no_grad()
def read(tokens: int, length: int) -> tuple[list[Tensor], list[Layer]]:
    """What each layer of MiniLM reads in so many tokens of wikitext2, texts of that length in a row, (tokens, dim); and the layers."""
    checkpoint = minilm()
    bert: Any = checkpoint.model
    text = data("wikitext2/test.txt").read_text()
    ids = checkpoint.processor(text[: 8 * LONG], return_tensors="pt", truncation=True, max_length=tokens)["input_ids"][0]  # type: ignore[misc]
    states = bert(ids.view(-1, length), output_hidden_states=True).hidden_states
    return [state.flatten(0, 1) for state in states], [bert_layer(part.attention) for part in bert.encoder.layer]


def bert_layer(part: Any) -> Layer:
    """The attention of one layer of a BERT, up to its output matrix."""
    maps = [part.self.query, part.self.key, part.self.value, part.output.dense]
    return Layer(*(m.weight.mT for m in maps), heads=part.self.num_attention_heads, biases=[m.bias for m in maps])


def over(base: str, row: dict[str, Timing], inverse: bool = False) -> dict[str, float]:
    """The other cases' medians as multiples of one."""
    return {name: round(t.median / row[base].median, 2) for name, t in row.items() if name != base or not inverse}


def pair(row: dict[str, Timing]) -> dict[str, float]:
    """How many times a JVP and a VJP fit into torch.func's."""
    theirs = row["torch.func.jvp"].median + row["torch.func.vjp"].median
    ours = {"near": ("JVP", "VJP"), "from weights": ("JVP from weights", "VJP from weights")}
    return {name: round(theirs / sum(row[part].median for part in parts), 2) for name, parts in ours.items()}


def shown(full: Any, ratios: Any, shares: Any, pairs: Any, lipschitz: Any) -> str:
    rows = [
        [size, f"{full[size]['closed form'].median * 1e3:.1f}", *(f"{x:.1f}" for x in row.values())] for size, row in ratios.items()
    ]
    parts = [table("full Jacobian: how many times faster than each", ["n, d, heads", "ms", *next(iter(ratios.values()))], rows)]
    rows = [
        [size, *(f"{x:.2f}" for x in row.values()), *(f"{x:.2f}" for x in pairs[size].values())] for size, row in shares.items()
    ]
    head = ["n, d, heads", *next(iter(shares.values())), "pair x", "pair from weights x"]
    parts.append(table("products, in forward passes; the pair against torch.func's", head, rows))
    rows = [[name, f"{row['value']:.2f}", f"{row['error']:.1e}", str(row["iterations"])] for name, row in lipschitz.items()]
    parts.append(table("local Lipschitz constants of MiniLM's attention", ["", "value", "error", "iterations"], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
