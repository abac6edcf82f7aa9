"""A folder that one process fills whole or not at all, whenever it is stopped."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claimed(folder: Path, done: str, busy: str, ours: re.Pattern[str]) -> Iterator[None]:
    """A folder of this process alone, empty but for its lock; emptied again if the work in it fails.

    Args:
        folder: new or empty, or left by a process that was killed.
        done: the file whose presence means that the work is complete.
        busy: the lock, whose presence without `done` means that it is not.
        ours: names of the files that may be removed.
    """
    from filelock import FileLock, Timeout

    lock = folder / busy
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: a file is in the way of the folder")
    refuse(folder, done)
    others = [path.name for path in folder.iterdir()] if folder.exists() else []
    if others and not (
        lock.exists() and all(other == busy or ours.fullmatch(other) for other in others)
    ):
        raise ValueError(
            f"{folder}: not empty, and not an interrupted preparation's; choose another folder"
        )
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder}: another process is preparing it") from None
    with held:
        refuse(folder, done)  # another process may have finished since
        clear(folder, ours)
        try:
            yield
        except BaseException:
            clear(folder, ours)
            lock.unlink(missing_ok=True)
            if made:
                folder.rmdir()
            raise
        lock.unlink(missing_ok=True)


def refuse(folder: Path, done: str) -> None:
    if (folder / done).exists():
        raise ValueError(
            f"{folder}: holds a prepared corpus already; choose another folder, or remove it"
        )


def clear(folder: Path, ours: re.Pattern[str]) -> None:
    for path in folder.iterdir():
        if ours.fullmatch(path.name):
            path.unlink()
