"""The tables of README: printed from docstrings and from results/*.json, between markers. `python -m benchmarks.tables` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heedful.mechanisms import ALL
from heedful.statistics import MEANING

from .complexity import said as terms_said
from .timing import RESULTS

README = Path(__file__).resolve().parents[1] / "README.md"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    text = filled(README.read_text("utf-8"))
    part = README.with_suffix(".part")
    part.write_text(text, "utf-8")
    part.replace(README)
    print(f"written: {README.name}, {len(PLACE.findall(text))} tables")


def filled(text: str) -> str:
    """The text with every table between its markers as the results have it now."""
    return PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def statistics() -> str:
    near = [name for name in MEANING if name.startswith("near_")]
    rows = [[f"`{name}`", meaning] for name, meaning in MEANING.items() if name not in near[1:]]
    return markdown(["column", "meaning"], [[f"`{near[0]}` ... `{near[-1]}`", m] if near[0] in n else [n, m] for n, m in rows])


def mechanisms() -> str:
    rules = ("causal", "keys", "window", "bias", "cross", "state")
    rows = [[f"`{m.__name__}`", _first_sentence(m), *("yes" if rule in m.supports else "-" for rule in rules)] for m in ALL]
    return markdown(["mechanism", "what it computes", "causal", "padding", "window", "bias", "cross", "decodes by a state"], rows)


def _first_sentence(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")


def demo() -> str:
    found = result("demo")
    head = f"all-MiniLM-L6-v2: {found['texts']} texts, {found['tokens']:,} tokens, {found['layers']} attention layers, every row"
    return "\n".join(["```", head, *(f"- {sentence}" for sentence in found["verdicts"]), "```"])


def scan() -> str:
    found = result("scan")
    rows = [[length, *(f"{x:g}" for x in row["ratios"].values())] for length, row in found["lengths"].items()]
    return markdown(["tokens", *next(iter(found["lengths"].values()))["ratios"]], rows)


def performer() -> str:
    found = result("performer")
    rows = []
    for mode, lengths in found["ratios"].items():
        for length, ratios in lengths.items():
            ms = found["seconds"][mode][length]["heedful"]["median"] * 1e3
            rows.append([mode, length, f"{ms:.2f}", f"{ratios['performer-pytorch']:.2f}", f"{ratios['sdpa']:.2f}"])
    return markdown(["", "tokens", "ms", "x faster than performer-pytorch", "x faster than SDPA"], rows)


def peers() -> str:
    rows = []
    for name, lengths in result("peers")["found"].items():
        for length, row in lengths.items():
            size = row["bytes"]["theirs"] / row["bytes"]["ours"]
            rows.append(
                [name, length, f"{row['seconds']['ours']['median'] * 1e3:.1f}", f"{row['ratios']['theirs']:.2f}", f"{size:.1f}"]
            )
    return markdown(["", "tokens", "ms", "x faster", "x less memory"], rows)


def heads() -> str:
    found = result("heads")["models"]
    columns = [(model, work) for model, rows in found.items() for work in next(iter(rows.values()))]
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    rows = [[name, *(_both_texts(found[model].get(name, {}).get(work)) for model, work in columns)] for name in names]
    return markdown(["relative output error", *(f"{model}, {work} keys" for model, work in columns)], rows)


def _both_texts(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return " / ".join(f"{x['median']:.2f}" for x in found.values() if isinstance(x, dict))


def landmarks() -> str:
    found = result("landmarks")["perplexity"]["SmolLM2-135M"]
    rows = [
        [work, *(f"{x:.2f}" for x in row.values())]
        for work, row in sorted(found.items(), key=lambda r: len(r[0]))
        if work != "exact"
    ]
    ways = next(list(row) for work, row in found.items() if work != "exact")
    return markdown([f"keys for each query (exact attention: {found['exact']:.2f})", *ways], rows)


def complexity() -> str:
    rows = []
    for name, row in result("complexity")["mechanisms"].items():
        theory, power = row["theory"] or {}, row["time_exponent"]
        longest = max(map(int, row["seconds"]), default=0)
        rows.append(
            [
                f"`{name}`",
                theory.get("said", "-"),
                "-" if power is None else f"n^{power:.2f}",
                terms_said(row.get("two_terms")),
                longest,
                theory.get("sequential", "-"),
            ]
        )
    return markdown(["", "time by design", "measured", "share of that term", "up to tokens", "operations in sequence"], rows)


def decoding() -> str:
    found, rows = result("decoding")["prompts"], []
    for length, ways in found.items():
        exact = next(iter(ways.values()))["seconds_per_token"]["median"]
        for name, row in ways.items():
            share = row["seconds_per_token"]["median"] / exact
            rows.append([length, name, f"{row['bytes_after_writing'] / 1e6:.1f}", f"{share:.2f}"])
    return markdown(["prompt", "every layer by", "cache, MB", "time of a token, of exact"], rows)


def explain() -> str:
    lines = []
    for what, row in result("explain")["models"]["MiniLM"].items():
        lines += [f"--what {what}", *(f"- {sentence}" for sentence in row["sentences"])]
    return "\n".join(["```", *lines, "```"])


def exact() -> str:
    """What closed forms cost, against torch.func, a forward pass or a dense matrix."""
    jacobian, paths, rank = result("jacobian"), result("paths")["models"], result("rank")["lengths"]
    rows = [
        [f"Jacobian of a layer, (n, d, H) = ({sizes})", f"{ratios['jacrev']:.0f} x faster than torch.func.jacrev"]
        for sizes, ratios in jacobian["jacobian_ratios"].items()
    ]
    rows += [
        [
            f"JVP / VJP of a layer, ({sizes})",
            f"{r['JVP']:.2f} / {r['VJP']:.2f} of a forward (torch.func {r['torch.func.jvp']:.2f} / {r['torch.func.vjp']:.2f})",
        ]
        for sizes, r in jacobian["products_over_forward"].items()
    ]
    for model, lengths in paths.items():
        length, row = max(lengths.items(), key=lambda item: int(item[0]))
        whole = "all lengths" if row["max_length"] is None else f"lengths to {row['max_length']}, the longer together"
        cost = " / ".join(f"{row['over_forward'][way]:.1f}" for way in ("gate", "source"))
        rows.append(
            [
                f"paths of {model}, {length} tokens, {whole} (gate / source)",
                f"{cost} of a forward, sums within {row['errors']['float64']['gate']:.0e}",
            ]
        )
    length, row = max(rank.items(), key=lambda item: int(item[0]))
    rows.append(
        [
            f"effective rank, {length} tokens",
            f"{row['over_forward']:.1f} of a fused forward, {row['bytes'] / 1e6:.0f} MB (the matrices: {row['dense_bytes'] / 1e6:.0f} MB)",
        ]
    )
    return markdown(["closed form", "cost"], rows)


def resized() -> str:
    rows = []
    for name, row in result("resize")["MiniLM"].items():
        cells = [row[way][text] for text in ("other sentences", "another text") for way in ("fitted", "plain")]
        rows.append([name, *(f"{x['cosine']:.4f} / {x['neighbours']:.2f}" for x in cells)])
    return markdown(["MiniLM, 32 dims", "fitted", "plain", "fitted, another text", "plain, another text"], rows)


def perplexities() -> str:
    rows = []
    for name, row in result("resize")["SmolLM2-135M"].items():
        plain = f"{row['plain']['perplexity']:.1f}" if "plain" in row else "-"
        rows.append([name, f"{row['fitted']['perplexity']:.2f}", plain, f"{row['fitted']['bytes of a cached token'] / 1000:.1f}"])
    return markdown(["SmolLM2-135M, 64 dims", "perplexity, fitted", "plain", "cache, kB a token"], rows)


def tokens() -> str:
    found, rows = result("resize")["decoding"], []
    exact = next(iter(found.values()))["seconds of a token"]["median"]
    for name, row in found.items():
        rows.append([name, f"{row['cache, bytes'] / 1e6:.1f}", f"{row['seconds of a token']['median'] / exact:.2f}"])
    return markdown(["SmolLM2-135M after 1024 tokens", "cache, MB", "time of a token"], rows)


BAR = "\\|"  # a bar inside a cell


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    """A table of Markdown.

    >>> print(markdown(["L", "ms"], [[1024, 2.5]]))
    | L | ms |
    |---|---|
    | 1024 | 2.5 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "|" + "|".join(line) + "|" if line[0] == "---" else f"| {' | '.join(str(cell).replace('|', BAR) for cell in line)} |"
        for line in lines
    )


TABLES: dict[str, Callable[[], str]] = {
    "statistics": statistics,
    "mechanisms": mechanisms,
    "demo": demo,
    "scan": scan,
    "performer": performer,
    "peers": peers,
    "heads": heads,
    "landmarks": landmarks,
    "complexity": complexity,
    "decoding": decoding,
    "explain": explain,
    "exact": exact,
    "resized": resized,
    "perplexities": perplexities,
    "tokens": tokens,
}

if __name__ == "__main__":
    main()
