"""Scan: a model reads texts, and every attention call on the way is looked at once."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .about import About, versions
from .attention import Capture
from .checkpoint import Checkpoint, load
from .files import write
from .findings import Findings
from .finite import check_finite
from .huggingface import Unreachable, attention_modules, coverage, watching, watching_sdpa
from .inputs import Reading, collate, read
from .looking import Look, watching_states
from .progress import bar
from .statistic import Statistic
from .statistics import ALL
from .texts import items

PARTIAL = "unfinished.safetensors"
ADVICE = "give a model that calls torch's scaled_dot_product_attention or transformers' attention interface"
EVERY = 30.0  # seconds between two copies of an unfinished scan


def scan(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any,
    rows: int | None = 256,
    limit: int | None = None,
    batch: int = 8,
    length: int | None = None,
    seed: int = 0,
    statistics: Sequence[type[Statistic]] = ALL,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Findings:
    """Find out what the attention of a model does while it reads.

    `texts` is a list (of texts, images, mono waves, token ids or ready-made inputs) or a path to a .txt (one long text, cut into pieces
    of `length` tokens), .jsonl, .parquet, .wav, image, or a folder of them. `rows` query rows are looked at in each longer text, all
    with None: sampled figures come with an error. With `out` the findings are saved there, and now and then on the way: `resume` goes on
    where a scan stopped and ends with the same findings.
    """
    _check(rows, statistics, out, resume)
    checkpoint = load(model)
    reading = read(checkpoint, items(texts, limit), batch, length, limit)
    about = About(checkpoint.name, checkpoint.fingerprint, 0, 0, reading.truncated, reading.length, reading.longest, rows, seed)
    look = Look(statistics, rows, seed)
    work = _Work(checkpoint, reading, look, replace(about, versions=versions()), Path(out) if out else None)
    if work.out is not None and (found := work.open(resume)) is not None:
        return found
    with evaluating(checkpoint.model), bar("scan", reading.size if progress else None, _tokens) as shown:
        work.read(shown.advance)
    return work.finish()


@dataclass
class _Work:
    """A scan under way."""

    checkpoint: Checkpoint
    reading: Reading
    look: Look
    about: About
    out: Path | None
    done: int = 0  # batches

    @property
    def mark(self) -> str:
        """Tells scans apart: an unfinished one goes on only as what it was."""
        names = [s.__name__ for s in self.look.statistics]
        parts = (self.about.fingerprint, self.reading.digest, self.about.rows, self.about.seed, names, str(self.checkpoint.device))
        return hashlib.sha256(str(parts).encode()).hexdigest()

    def open(self, resume: bool) -> Findings | None:
        """Take up an unfinished scan in `out`; the findings where it was finished already."""
        assert self.out is not None
        begun = self.out / PARTIAL
        if begun.exists() and not resume:
            raise ValueError(
                f"{self.out} holds an unfinished scan; go on with it by resume=True (--resume), or remove {begun.name} there to start over."
            )
        if not begun.exists():
            found = self._finished() if resume else None
            if found is None:
                write(begun, self.findings().to_bytes(mark=self.mark, done=0))  # a folder that cannot be written says so now
            return found
        found, header = Findings.read(begun)
        if header.get("mark") != self.mark:
            raise ValueError(
                f"the unfinished scan in {self.out} is of another model, other texts or settings; give it those, or another folder."
            )
        self.look.layers, self.look.depths = found.layers, found.depths
        self.look.shapes, self.about, self.done = dict(found.about.layers), found.about, header["done"]
        return None

    def _finished(self) -> Findings | None:
        assert self.out is not None
        path = self.out / "findings.safetensors"
        if not path.exists():
            return None
        found, header = Findings.read(path)
        if header.get("mark") != self.mark:
            raise ValueError(f"{self.out} holds findings of another model, other texts or settings; give --resume another folder.")
        return found

    def read(self, advance: Callable[[int], None]) -> None:
        """Read the batches that are left."""
        saved = time.monotonic()
        batches = self.reading.batches
        advance(sum(s.size for group in batches[: self.done] for s in group))
        with self._begun():
            for group in batches[self.done :]:
                inputs = collate(self.checkpoint, group)
                self._look_at(inputs)
                self._count(group, inputs)
                advance(sum(sample.size for sample in group))
                if self.out is not None and time.monotonic() - saved > EVERY:
                    write(self.out / PARTIAL, self.findings().to_bytes(mark=self.mark, done=self.done))
                    saved = time.monotonic()

    def _look_at(self, inputs: dict[str, Any]) -> None:
        """Read one batch before the watchers."""
        model, ready = self.checkpoint.model, prepare(self.checkpoint.model, inputs)
        self.look.begin(inputs)

        def call(capture: Capture) -> None:
            check_finite(capture, model)
            self.look.call(capture)

        with watching_calls(model, call), watching_states(model, list(attention_modules(model)), self.look):
            if self.done == 0:
                self.about = replace(self.about, missed=_missed(model, ready))
            else:
                run(model, ready)
        if not self.look.layers:
            raise Unreachable(f"{type(model).__name__} read a batch without an attention call that could be seen; {ADVICE}.")

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Leave nothing behind where not even the first batch could be read."""
        try:
            yield
        except Exception:
            if self.out is not None and self.done == 0:
                (self.out / PARTIAL).unlink(missing_ok=True)
                with suppress(OSError):  # it holds other files
                    self.out.rmdir()
            raise

    def _count(self, group: list, inputs: dict[str, Any]) -> None:
        self.done += 1
        first = next(x for x in inputs.values() if isinstance(x, Tensor))
        mask = inputs.get("attention_mask")
        rows = isinstance(mask, Tensor) and mask.ndim == 2  # one row for each text; with one for each query it counts no tokens
        tokens = int(torch.as_tensor(mask).sum()) if rows else sum(s.size for s in group)
        texts = len(group) if group[0].kind != "Mapping" else len(first)
        self.about = replace(self.about, texts=self.about.texts + texts, tokens=self.about.tokens + tokens)

    def findings(self) -> Findings:
        missed = {name: why for name, why in self.about.missed.items() if name not in self.look.layers}
        about = replace(self.about, layers=dict(self.look.shapes), missed=missed)
        return Findings(about, dict(self.look.layers), dict(self.look.depths))

    def finish(self) -> Findings:
        """The findings, saved where they should be."""
        found = self.findings()
        if self.out is not None:
            found.save(self.out, mark=self.mark)
            (self.out / PARTIAL).unlink(missing_ok=True)
        return found


def _tokens(count: float) -> str:
    return f"{count:,.0f} tokens"


def _check(rows: int | None, statistics: Sequence[type[Statistic]], out: Any, resume: bool) -> None:
    if rows is not None and rows < 2:
        raise ValueError(f"rows is {rows}; an error needs at least 2 rows of each text, None looks at all.")
    if not statistics:
        raise ValueError("no statistic was asked for; give at least one, or leave out `statistics` for all.")
    if resume and out is None:
        raise ValueError("resume needs the folder of the unfinished scan; give it as out.")


def watching_calls(model: nn.Module, watcher: Callable) -> Any:
    """Show the watcher every attention call of a Hugging Face model or a plain PyTorch one."""
    return watching(model, watcher) if hasattr(model, "config") else watching_sdpa(model, watcher)


def _missed(model: nn.Module, inputs: dict[str, Any]) -> dict[str, str]:
    """Read the first batch: the attention modules that it did not bring to the seam and why; an error where it brought none."""
    if not hasattr(model, "config"):
        run(model, inputs)
        return {}
    found = coverage(model, lambda: run(model, inputs))
    if not found.reached:
        found.check()
    return dict(found.missed)


def prepare(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with what a decoder reads: what its encoder reads, or what the model makes of sounds. To be called before watching."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in inputs:
        return inputs
    if "input_ids" in inputs:
        return {**inputs, **_shifted(config, inputs)}
    if hasattr(model, "generate"):
        made = model.generate(**inputs, max_new_tokens=64, do_sample=False)  # type: ignore[operator]
    else:  # a body without a head to write with reads the first token
        made = torch.full((len(next(iter(inputs.values()))), 1), _start(config), device=next(model.parameters()).device)
    return {**inputs, "decoder_input_ids": made}


def run(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Let the part of a model that attends read a prepared batch; a head over the vocabulary is not computed."""
    body = _body(model, inputs)
    accepted = inspect.signature(body.forward).parameters
    if "use_cache" in accepted:
        inputs = {**inputs, "use_cache": False}
    with torch.no_grad():
        body(**inputs)


def _body(model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    """The module to call: the one tower that the inputs are for, or all but the head."""
    two_towers = {"input_ids": "text_model", "pixel_values": "vision_model"}
    for name, tower in two_towers.items():
        if hasattr(model, "text_model") and hasattr(model, "vision_model") and set(inputs) & set(two_towers) == {name}:
            return getattr(model, tower)
    return getattr(model, "base_model", model)


def _start(config: Any) -> int:
    """The token that a decoder begins with."""
    known = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    return next((x for x in known if x is not None), 0)


def _shifted(config: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same text, one token later, for the decoder."""
    ids = inputs["input_ids"]
    shifted = {"decoder_input_ids": torch.cat([torch.full_like(ids[:, :1], _start(config)), ids[:, :-1]], 1)}
    if "attention_mask" in inputs:
        shifted["decoder_attention_mask"] = inputs["attention_mask"]
    return shifted


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and afterwards as it was."""
    training = {module: module.training for module in model.modules()}  # a part may be frozen in a model that trains
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
