"""Texts: what a scan may be given to read, from lists, files and folders; images, sounds and token ids likewise."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}


@dataclass(frozen=True)
class Long:
    """One long text, to be cut into pieces of the model's length."""

    text: str


@dataclass(frozen=True, eq=False)
class Image:
    """An image that is opened when its turn comes."""

    source: Any  # a path, bytes or PIL image

    def open(self) -> Any:
        if not isinstance(self.source, bytes | Path):
            return self.source
        try:
            from PIL import Image as pillow
        except ImportError as error:
            raise ImportError("images need pillow: pip install heedful[images].") from error
        return pillow.open(io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source).convert("RGB")


@dataclass(frozen=True, eq=False)
class Sound:
    """A mono wave with its sampling rate (None: the model's own)."""

    wave: Tensor
    rate: int | None = None


@dataclass(frozen=True)
class Tokens:
    """Token ids, special tokens included."""

    ids: list[int]


Item = str | Long | Image | Sound | Tokens | Mapping


def items(texts: Any, limit: int | None = None) -> list[Item]:
    """What there is to read, at most `limit` of them.

    >>> items(["one text", "another", "  "])
    ['one text', 'another']
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; read at least 1 text, or all with None.")
    if isinstance(texts, str) and not _is_path(texts):
        raise ValueError(f"there is no file or folder {texts!r}; to scan one text itself, give a list: [text].")
    source = _of_path(Path(texts)) if isinstance(texts, str | Path) else _of_values(texts)
    found = list(islice((item for item in source if not _blank(item)), limit))
    if not found:
        raise ValueError("there is nothing to scan: no text, or only empty ones, was given; give at least one that is not empty.")
    return found


def _blank(item: Item) -> bool:
    text = item.text if isinstance(item, Long) else item
    return isinstance(text, str) and not text.strip()


def _is_path(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # longer than a path may be
        return False


def _of_values(texts: Any) -> Iterator[Item]:
    if isinstance(texts, Mapping):
        raise ValueError("one mapping was given; to scan ready-made model inputs give a list of them: [inputs].")
    if not isinstance(texts, Iterable):
        raise ValueError(
            f"texts is {type(texts).__name__}; give a list of texts, or a path to .txt, .jsonl, .parquet, images or .wav."
        )
    for place, value in enumerate(texts):
        if isinstance(value, Path):
            yield from _of_path(value)
        else:
            yield _of_value(value, place)


def _of_value(value: Any, place: int) -> Item:
    """One item of a list, told by its type."""
    if isinstance(value, Tokens):
        return Tokens(_ids(value.ids, f"item {place}"))
    if isinstance(value, str | Long | Image | Sound | Mapping):
        return value
    if type(value).__module__.startswith("PIL."):
        return Image(value)
    if isinstance(value, list | tuple) and value and all(isinstance(x, int) for x in value):
        return Tokens(list(value))
    if hasattr(value, "__array__") or isinstance(value, Tensor):
        tensor = torch.as_tensor(value)
        if tensor.ndim == 1 and tensor.numel():
            return Sound(tensor.float()) if tensor.is_floating_point() else Tokens(tensor.tolist())
    raise ValueError(
        f"item {place} is {type(value).__name__}; a text (str), a path (Path), an image (PIL), a mono wave (1-d floats), token ids (1-d ints) "
        "or a mapping of model inputs is needed."
    )


def _of_path(path: Path) -> Iterator[Item]:
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}.")
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in (*READERS, *IMAGES) and p.is_file()]
        if not files:
            raise ValueError(f"{path} holds nothing to scan; files of these kinds are read: {_kinds()}.")
        for file in files:
            yield from _of_path(file)
        return
    suffix = path.suffix.lower()
    if suffix in IMAGES:
        yield Image(path)
    elif suffix in READERS:
        yield from READERS[suffix](path)
    else:
        raise ValueError(f"{path.name} is of no kind that is read here; use one of {_kinds()}.")


def _kinds() -> str:
    return ", ".join((*READERS, *sorted(IMAGES)))


def _txt(path: Path) -> Iterator[Item]:
    try:
        yield Long(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8.") from error


def _jsonl(path: Path) -> Iterator[Item]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise ValueError(f"{path}, line {number} is not JSON ({error}); mend or drop the line.") from error
                yield _of_record(value, f"{path}, line {number}")


def _of_record(value: Any, where: str) -> Item:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("input_ids"), list):
        return Tokens(_ids(value["input_ids"], where))
    strings = {name: x for name, x in value.items() if isinstance(x, str)} if isinstance(value, dict) else {}
    if "text" in strings or len(strings) == 1:
        return strings["text"] if "text" in strings else next(iter(strings.values()))
    raise ValueError(
        f"{where} holds no text: a string, or an object with `text` or one string field is needed; got {str(value)[:60]}."
    )


def _ids(ids: Any, where: str) -> list[int]:
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{where} holds no token ids: at least one whole number is needed in the list; got {str(ids)[:60]}.")
    return list(ids)


def _parquet(path: Path) -> Iterator[Item]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is damaged or not parquet ({error}).") from error
    name = _column(path, file.schema_arrow)
    for batch in file.iter_batches(64, columns=[name]):
        for value in batch.column(0).to_pylist():
            if isinstance(value, dict):  # as Hugging Face stores images
                value = value["bytes"] if value.get("bytes") is not None else Path(value["path"])
            if value is not None:
                yield value if isinstance(value, str) else Image(value)


def _column(path: Path, schema: Any) -> str:
    """The column to read: `text`, or the only one that holds strings, or the only one that holds images."""
    kinds = {field.name: str(field.type) for field in schema}
    strings = [name for name, kind in kinds.items() if kind in ("string", "large_string", "string_view")]
    images = [name for name, kind in kinds.items() if kind in ("binary", "large_binary") or kind.startswith("struct<bytes: binary")]
    for found in (["text"] if "text" in strings else [], strings, images):
        if len(found) == 1:
            return found[0]
    raise ValueError(f"{path} has columns {kinds}; name the one to read `text`, or leave one string or image column.")


def _wav(path: Path) -> Iterator[Item]:
    try:
        with wave.open(str(path)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = bytearray(file.readframes(file.getnframes()))
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path} is damaged or not PCM wave ({error}); convert it to 16-bit PCM.") from error
    if width not in (2, 4):
        raise ValueError(f"{path} has {8 * width}-bit samples; convert it to 16-bit PCM.")
    samples = torch.frombuffer(raw, dtype={2: torch.int16, 4: torch.int32}[width]) / 2 ** (8 * width - 1)
    yield Sound(samples.unflatten(0, (-1, channels)).mean(-1), rate)


READERS: dict[str, Callable[[Path], Iterator[Item]]] = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet, ".wav": _wav}
