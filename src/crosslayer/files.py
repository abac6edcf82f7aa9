"""Files that are there whole or not at all, whenever a process or its machine dies."""

import os
from pathlib import Path


def write(path: Path, content: str) -> None:
    """Write a text file aside, then in place of what was there."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(content, "utf8")
    settle(aside, path)


def settle(aside: Path, path: Path) -> None:
    """Give a file or a folder its name once its content is safe; then make the name safe too."""
    synchronise(aside)
    os.replace(aside, path)
    synchronise(path.parent)


def synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
