"""Files that are whole or absent: written beside their place, then moved into it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: str | Path, content: bytes | str) -> Path:
    """Write a file in one step: a reader, a crash or a full disk never meets half of it."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}. Choose a folder you may write to.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write {path}: {error.strerror}. Nothing was changed; make room and try again."
        ) from error
    finally:
        Path(beside).unlink(missing_ok=True)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
