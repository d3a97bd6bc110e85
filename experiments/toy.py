"""A small character model that experiments train and grow: two layers, few key dims, plain matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.lesson import Lesson
from heedful.mask import Mask
from heedful.statistics.growth import Growth

DIM, HEADS, WIDTH, TOKENS, LAYERS = 48, 4, 12, 64, 2


def text() -> str:
    """Tiny Shakespeare where the data is, else heedful's own demo text."""
    from benchmarks.real import data

    try:
        return data("tinyshakespeare/input.txt").read_text("utf-8")
    except SystemExit:
        return (Path(__file__).parents[1] / "src" / "heedful" / "demo.txt").read_text("utf-8")


class Characters:
    """Sequences of character numbers: the first nine tenths to learn from, the last to judge."""

    def __init__(self):
        whole = text()
        words = sorted(set(whole))
        self.size = len(words)
        ids = torch.tensor([words.index(c) for c in whole[:400_000]])
        cut = len(ids) * 9 // 10
        self.parts = {"learn": ids[:cut], "judge": ids[cut:]}

    def draw(self, part: str, count: int, seed: int) -> Tensor:
        """(count, TOKENS + 1) of one part, the same for one seed."""
        own = self.parts[part]
        starts = torch.randint(len(own) - TOKENS - 1, (count,), generator=torch.Generator().manual_seed(seed))
        return own[starts[:, None] + torch.arange(TOKENS + 1)]


class Attention(nn.Module):
    """Multi-head attention whose logits keep the scale of the key dims that it began with."""

    def __init__(self, key_dims: int):
        super().__init__()
        self.scale = key_dims**-0.5
        self.w_q = nn.Parameter(torch.randn(HEADS, DIM + 1, key_dims) * DIM**-0.5)
        self.w_k = nn.Parameter(torch.randn(HEADS, DIM, key_dims) * DIM**-0.5)
        self.w_v = nn.Parameter(torch.randn(HEADS, DIM, WIDTH) * DIM**-0.5)
        self.w_o = nn.Parameter(torch.randn(HEADS * WIDTH, DIM) * (HEADS * WIDTH) ** -0.5)
        self.notes: list[tuple[Tensor, ...]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q = F.pad(x, (0, 1), value=1.0)[:, None] @ self.w_q
        k, v = x[:, None] @ self.w_k, x[:, None] @ self.w_v
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        made = out.transpose(1, 2).flatten(2) @ self.w_o
        if self.notes is not None:
            self.notes.append((q, k, v, x, out, made))
        return made


class Toy(nn.Module):
    """Embeddings, layers of attention and MLP with norms before, and the logits of the next character."""

    def __init__(self, size: int, key_dims: int, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(size, DIM), nn.Parameter(torch.randn(TOKENS, DIM) * 0.1)
        self.attention: Any = nn.ModuleList(Attention(key_dims) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(DIM, size)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of the next characters."""
        x = self.words(ids[:, :-1]) + self.places
        for i in range(LAYERS):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return F.cross_entropy(self.head(self.norms[-1](x)).flatten(0, 1), ids[:, 1:].flatten())


def adam(model: Toy) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def train(model: Toy, optimiser: torch.optim.Optimizer, characters: Characters, steps: range) -> None:
    """Batches are numbered, so that all models meet the same ones."""
    for step in steps:
        optimiser.zero_grad()
        model(characters.draw("learn", 32, 1000 + step)).backward()
        optimiser.step()


@torch.no_grad()
def judge(model: Toy, ids: Tensor) -> float:
    return sum(float(model(part)) * len(part) for part in ids.split(64)) / len(ids)


def lessons(model: Toy, ids: Tensor) -> list[Lesson]:
    """A lesson of each layer; gradients are of the summed loss."""
    for layer in model.attention:
        layer.notes = []
    try:
        loss = model(ids) * ids[:, 1:].numel()
        notes = [layer.notes[0] for layer in model.attention]
        gradients = iter(torch.autograd.grad(loss, [t for note in notes for t in note[4:]]))
    finally:
        for layer in model.attention:
            layer.notes = None
    found = []
    for i, note in enumerate(notes):
        q, k, v, x, out, _ = (t.detach() for t in note)
        call = (q, k, v, Mask(causal=True), model.attention[i].scale)
        found.append(Lesson(str(i), *call, out=out, states=x, gradient=next(gradients), returned=next(gradients)))
    return found


def measured(model: Toy, ids: Tensor, kept: int) -> tuple[list[Growth], list[list[Lesson]]]:
    """The growth statistics of each layer, batches falling by turns into the folds, and the lessons of the first `kept` batches."""
    growths: list[Growth] = []
    some: list[list[Lesson]] = [[] for _ in range(LAYERS)]
    for number, part in enumerate(ids.split(32)):
        for i, lesson in enumerate(lessons(model, part)):
            found = Growth.of_lesson(lesson, number % 2, graded=part[:, 1:].numel())
            growths = [*growths, found] if len(growths) == i else [g + found if j == i else g for j, g in enumerate(growths)]
            if number < kept:
                some[i].append(lesson)
    return growths, some


def grown(model: Toy, dims: Sequence[tuple[Tensor, Tensor]]) -> Toy:
    """A copy with these columns (w_q, w_k) added to each layer."""
    bigger = deepcopy(model)
    for layer, (w_q, w_k) in zip(bigger.attention, dims, strict=True):
        layer.w_q = nn.Parameter(torch.cat([layer.w_q.detach(), w_q.to(layer.w_q)], -1))
        layer.w_k = nn.Parameter(torch.cat([layer.w_k.detach(), w_k.to(layer.w_k)], -1))
    return bigger


def carried(optimiser: torch.optim.Adam, before: Toy, after: Toy) -> torch.optim.Adam:
    """An optimiser of the grown model with the state of the old: moments of new columns are zero, steps go on."""
    found = adam(after)
    for old, new in _pairs(before, after):
        state = optimiser.state[old]
        room = [0, new.shape[-1] - old.shape[-1]]
        found.state[new] = {
            "step": state["step"].clone(),
            "exp_avg": F.pad(state["exp_avg"], room),
            "exp_avg_sq": F.pad(state["exp_avg_sq"], room),
        }
    return found


def _pairs(before: Toy, after: Toy) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    yield from zip(before.parameters(), dict(_in_order(before, after)).values(), strict=True)


def _in_order(before: Toy, after: Toy) -> Iterator[tuple[str, nn.Parameter]]:
    named = dict(after.named_parameters())
    for name, _ in before.named_parameters():
        yield name, named[name]
