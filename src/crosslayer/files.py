"""Atomic writes: after a crash a file is either complete or as it was before."""

import os
from pathlib import Path


def write_text_atomic(path: Path, content: str) -> None:
    """Write `content` to a temporary file beside `path`, then rename it to `path`."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(content, "utf8")
    atomic_replace(temporary, path)


def atomic_replace(temporary: Path, path: Path) -> None:
    """Rename a file or a folder to `path` once its content is on disk."""
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
