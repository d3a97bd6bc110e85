"""Self-attention without skips loses rank with depth: the tokens of a text become one vector.

Source 001, section 2.2: "the transformer structure will lead to 'rank losing' of input matrix ... the input will be embedded into the same
word vector". Expected for MiniLM on 128 tokens, |res X| / |X| in the composite norm by layer: full .956 .958 .983 .803 .789 .832 .857; no
MLP .956 .968 .964 .896 .865 .874 .842; no attention skip .956 .716 .560 .124 2.9e-3 8.5e-8 floor; SAN + LN .956 .779 .142 9.9e-4 9.6e-10
floor; pure SAN .956 .627 .055 3.1e-6 floor. (Which text gave these figures is not known; ours is the first of wikitext2's test texts.)
New here: SmolLM2, causal and rotary, and ViT-Tiny as it is before training.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ViTConfig, ViTModel

from benchmarks.real import data, smollm2
from heedful import Checkpoint
from heedful.explaining import Curves, collapse_curves
from heedful.huggingface.ablate import ABLATIONS

from .drawing import COLOURS, figure
from .real import minilm, text

VERDICT = "holds if there is no skip and the logits stay small: with skips it does not happen, and without norms SmolLM2's logits grow until its attention is one-hot and keeps the rank"
ERRATA = ()
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"tokens": 32, "texts": 1, "smollm2": False, "layers": 4},
    "small": {"tokens": 128, "texts": 4, "smollm2": True, "layers": 12},
    "full": {"tokens": 256, "texts": 16, "smollm2": True, "layers": 12},
}


def measure(size: str) -> dict[str, Any]:
    """The curves of each model under each ablation, means over texts or images."""
    setting = SIZES[size]
    pages = [text()[i * 20 * setting["tokens"] :][: 20 * setting["tokens"]] for i in range(setting["texts"])]
    read = partial(collapse_curves, length=setting["tokens"])
    found = {"MiniLM": read(minilm(), pages)}
    if setting["smollm2"]:
        found["SmolLM2-135M"] = read(smollm2(), pages)
    found["ViT-Tiny, random"] = collapse_curves(
        vit(setting["layers"]), [{"pixel_values": x[None]} for x in images(setting["texts"])]
    )
    return {**setting, "curves": {name: lines(curves) for name, curves in found.items()}}


def lines(curves: Curves) -> dict[str, list[float]]:
    return {name: curves.only(name) for name in curves.curves}


def vit(layers: int) -> Checkpoint:
    """The shape of ViT-Tiny (192 dims, 3 heads) for images of 32 x 32 in patches of 4, its weights as they are drawn."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": layers, "num_attention_heads": 3, "intermediate_size": 768}
    return Checkpoint(ViTModel(ViTConfig(**sizes, image_size=32, patch_size=4)).eval(), None, "ViT-Tiny, random")  # type: ignore[arg-type]


def images(count: int) -> Tensor:
    """Of CIFAR-10's test set, or noise where it is not there."""
    try:
        from PIL import Image
        from pyarrow.parquet import read_table

        table = read_table(data("cifar10_jpeg/test.parquet"), columns=["jpeg"]).slice(0, 64 * count)
        opened = [Image.open(io.BytesIO(table["jpeg"][64 * i].as_py())).convert("RGB") for i in range(count)]
        pixels = torch.stack([torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8).view(32, 32, 3) for one in opened])
        return pixels.permute(0, 3, 1, 2) / 127.5 - 1
    except (SystemExit, ImportError):
        return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def holds(numbers: dict[str, Any]) -> bool:
    curves = numbers["curves"]
    mini, rest = curves["MiniLM"], [curves[name] for name in curves if name != "MiniLM"]
    kept = all(line[name][-1] > 0.05 for line in [mini, *rest] for name in ("full", "no MLP"))
    lost = mini["no attention skip"][-1] < 1e-5 and all(line["SAN + LN"][-1] < 1e-5 for line in [mini, *rest])
    one_hot = "SmolLM2-135M" not in curves or curves["SmolLM2-135M"]["pure SAN"][-1] > 0.5
    return kept and lost and mini["pure SAN"][4] < 1e-12 and one_hot


def figure_of(numbers: dict[str, Any]) -> str:
    shown = []
    for model, by in numbers["curves"].items():
        last = ", ".join(f"{name} {by[name][-1]:.2g}" for name in ABLATIONS if name in by)
        shown.append(f"{model} after {len(by['full']) - 1} layers: {last}")
    return "; ".join(shown)


def draw(numbers: dict[str, Any], path: Path) -> None:
    curves = numbers["curves"]
    with figure(path, panels=len(curves)) as panels:
        for axes, (model, by) in zip(panels, curves.items(), strict=True):
            for (name, line), colour in zip(by.items(), COLOURS, strict=False):
                axes.semilogy([max(value, 1e-16) for value in line], "-o", color=colour, label=name, markersize=3)
            axes.set_xlabel("layer")
            axes.set_ylabel("|res X| / |X|, composite norm")
            axes.set_title(model, fontsize=10)
        panels[-1].legend(fontsize=8)
