"""Fitting: landmarks learned from captured attention calls, layer by layer, so that their outputs come near the exact ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor

from ..attention import Capture
from ..ops.hop import hop
from ..ops.landmarks import Learned, Tokens, elsewhere, far, nearby, padded, shared_out, tokens
from ..ops.merge import Part, merge
from .landmarks import Landmarks, initial

if TYPE_CHECKING:
    from jaxtyping import Float

Progress = Callable[
    [int, float], object
]  # called with the step and the held-out error, the median over heads (NaN: nothing is held out)

QUERIES = 512  # of one text in one step
KEYS = 4096  # that the first points are found among
ROUNDS = 6  # of k-means
LOOKS = 4  # at what is held out, while fitting
HELD_OUT = 6  # one capture in so many is held out


class Lesson(NamedTuple):
    """One capture, made ready: what does not change while landmarks learn is computed once."""

    tokens: Tokens
    near: Part  # of every chunk (batch, heads, chunks, chunk, ...)
    counted: Tensor
    exact: Float[Tensor, "batch heads chunks chunk width"]
    real: Float[Tensor, "batch chunks chunk"]  # 0 at padding
    energy: Float[Tensor, " heads"]  # mean |exact|^2 over real tokens
    causal: bool


def fit(
    landmarks: Landmarks, captures: Sequence[Capture], steps: int = 200, rate: float = 0.03, progress: Progress | None = None
) -> Landmarks:
    """Fit to the captures of one layer and return the same landmarks, with `errors`: the relative output error of each head, held out.

    Points start at k-means of the keys; Adam with a cosine schedule follows the squared output error of each head, relative to its
    output. One capture in six is held out (of a single capture, one text of its batch in six), and the best tensors on it are kept. With
    one text alone nothing can be held out: all steps are taken and `errors` stays empty. The same seed gives the same tensors.

    >>> from heedful.attention import Capture
    >>> calls = [Capture("a layer", *torch.randn(3, 1, 2, 128, 8) * 2, scale=8**-0.5) for _ in range(4)]
    >>> _, after = (Landmarks(8, chunk=16, sinks=0).fit(calls, steps).errors.mean() for steps in (0, 60))
    >>> bool(after < _)
    True
    """
    if not captures:
        raise ValueError("landmarks are fitted to captures of one layer; give at least one (hd.capture makes them).")
    captures = texts(captures[0]) if len(captures) == 1 else captures
    lessons = [lesson(capture, landmarks) for capture in captures]
    source = Generator("cpu").manual_seed(landmarks.seed)
    landmarks.learn(initial(first_points(captures, landmarks, source)))
    count = max(1, len(lessons) // HELD_OUT) if len(lessons) > 1 else 0
    teaching, held_out = lessons[: len(lessons) - count], lessons[len(lessons) - count :]
    best = _Best(landmarks, held_out, progress)
    best.look(0)
    optimizer = torch.optim.Adam(landmarks.parameters(), rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    for step in range(steps):
        if step % len(teaching) == 0:
            order = torch.randperm(len(teaching), generator=source, device="cpu").tolist()
        with torch.enable_grad():
            loss = losses(landmarks, teaching[order[step % len(teaching)]], source).sum()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // LOOKS) == 0 or step + 1 == steps:
            best.look(step + 1)
            if best.stale == 2:
                break
    optimizer.zero_grad()
    landmarks.learn(best.learned)
    landmarks.errors = best.errors
    return landmarks


def fit_model(
    captures: Mapping[str, Sequence[Capture]],
    landmarks: Landmarks,
    steps: int = 200,
    done: Callable[[str, Landmarks], object] | None = None,
) -> dict[str, Landmarks]:
    """One fitted copy of the landmarks for each layer of the captures, as hd.swap takes them; `done` is told of each."""
    found = {}
    for layer, calls in captures.items():
        found[layer] = fit(copy.deepcopy(landmarks), calls, steps)
        if done is not None:
            done(layer, found[layer])
    return found


def texts(capture: Capture) -> list[Capture]:
    """Each text of the batch as a capture of its own, but for those that are padding alone."""
    found, sources = [], capture.sources.tolist()
    for entry in range(len(capture.q)):
        q, k, v = (t[entry : entry + 1] for t in (capture.q, capture.k, capture.v))
        if sources[entry] > 0:
            found.append(replace(capture, q=q, k=k, v=v, mask=capture.mask.entry(entry), out=None, sample=None, real=None))
    return found or [capture]


@torch.no_grad()
def lesson(capture: Capture, landmarks: Landmarks) -> Lesson:
    """A capture made ready for these landmarks' chunks and sinks."""
    mask, q, k, v = capture.mask, capture.q, capture.k, capture.v
    landmarks.refuse(mask.demands | {n for n in ("cap", "null") if getattr(capture, n) is not None})
    if mask.offset or q.shape[2] != k.shape[2]:
        raise ValueError(f"landmarks are fitted to whole texts; got {q.shape[2]} queries for {k.shape[2]} keys.")
    q, k, v = (x.float() for x in (q, k, v))
    exact = hop(q, k, v, mask=mask, scale=capture.scale)[0]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    chunk = landmarks.chunk
    t = padded(tokens(q, k, v, mask.keys, capture.scale), -(-q.shape[2] // chunk) * chunk)
    part, counted = nearby(t, chunk, landmarks.sinks, mask.causal)
    exact = torch.nn.functional.pad(exact, (0, 0, 0, t.q.shape[2] - q.shape[2])).unflatten(2, (-1, chunk))
    real = t.real.unflatten(1, (-1, chunk)).float()
    squares = (exact.square().sum(-1) * real[:, None]).sum((0, 2, 3))
    return Lesson(t, part, counted, exact, real, squares / real.sum().clamp_min(1), mask.causal)


def losses(landmarks: Landmarks, given: Lesson, source: Generator | None = None) -> Float[Tensor, " heads"]:
    """The squared output error of each head, relative to its output; over some chunks of queries if a source of chance is given."""
    chunk, t, learned = landmarks.chunk, given.tokens, landmarks.learned
    (held,) = elsewhere([shared_out(t.k, t.v, given.counted, learned, chunk)], given.causal)
    picked = (
        slice(None) if source is None else torch.randperm(held.shape[2], generator=source, device="cpu")[: max(1, QUERIES // chunk)]
    )
    q, (out, lse), real = t.q.unflatten(2, (-1, chunk))[:, :, picked], given.near, given.real[:, picked]
    out, _ = merge((out[:, :, picked], lse[:, :, picked]), far(q, held[:, :, picked], learned, t.v.shape[-1]))
    squares = (out - given.exact[:, :, picked]).square().sum(-1) * real[:, None]
    return squares.sum((0, 2, 3)) / real.sum().clamp_min(1) / given.energy.clamp_min(1e-20)


class _Best:
    """The best tensors so far on what is held out; the last ones where nothing is."""

    def __init__(self, landmarks: Landmarks, held_out: list[Lesson], progress: Progress | None):
        self.landmarks, self.held_out, self.progress = landmarks, held_out, progress
        self.error, self.stale = float("inf"), 0

    @torch.no_grad()
    def look(self, step: int) -> None:
        errors = torch.stack([losses(self.landmarks, given) for given in self.held_out] or [torch.empty(0)]).mean(0).sqrt()
        error, self.stale = float(errors.square().mean()), self.stale + 1
        if not self.held_out or error < self.error:
            self.error, self.errors, self.stale = error, errors, 0
            self.learned = Learned(*(tensor.detach().clone() for tensor in self.landmarks.learned))
        if self.progress is not None:
            self.progress(step, float(errors.median()))


@torch.no_grad()
def first_points(captures: Sequence[Capture], landmarks: Landmarks, source: Generator) -> Float[Tensor, "heads landmarks dim"]:
    """Centres of the keys by k-means, one set for each query head."""
    groups = captures[0].q.shape[1] // captures[0].k.shape[1]
    share = -(-KEYS // sum(len(c.k) for c in captures))
    keys = []
    for capture in captures:
        for entry, k in enumerate(capture.k):  # (key heads, keys, dim)
            real = (
                torch.arange(k.shape[1])
                if capture.mask.keys is None
                else capture.mask.keys.expand(len(capture.k), -1)[entry].nonzero()[:, 0].cpu()
            )
            real = real[landmarks.sinks :]
            keys.append(
                k[:, real[torch.randperm(len(real), generator=source, device="cpu")[:share]].to(k.device)].float()
                * capture.scale**0.5
            )
    points = torch.cat(keys, 1)
    if points.shape[1] == 0:
        raise ValueError(
            f"no text has more than {landmarks.sinks} real tokens, and these are sinks; give longer texts, or Landmarks of fewer sinks."
        )
    return k_means(points, landmarks.landmarks, source).repeat_interleave(groups, 0)


def k_means(points: Tensor, number: int, source: Generator) -> Float[Tensor, "heads landmarks dim"]:
    """Centres of points (heads, many, dim); with few points some centres are equal but for a little noise."""
    chosen = torch.cat(
        [torch.randperm(points.shape[1], generator=source, device="cpu") for _ in range(-(-number // max(1, points.shape[1])))]
    )[:number]
    centres = points[:, chosen.to(points.device)]
    for _ in range(ROUNDS):
        nearest = (points @ centres.mT - centres.square().sum(-1)[:, None] / 2).argmax(-1, keepdim=True)
        taken = torch.zeros(*points.shape[:2], number, device=points.device).scatter_(2, nearest, 1.0)
        count = taken.sum(1)[..., None]
        centres = torch.where(count > 0, taken.mT @ points / count.clamp_min(1), centres)
    noise = torch.randn(centres.shape, generator=source, device="cpu").to(centres)
    return centres + 1e-3 * noise
