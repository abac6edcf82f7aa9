"""Files that survive crashes, other processes and other people: writes, locks and JSON."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", dict[str, Any], object)

LOCK_FILE = ".lock"
REPLACED_SUFFIX = ".replaced"  # of a folder until the new one has its name
UNFINISHED_SUFFIX = ".part"  # of a file or a folder until it is renamed


def short_digest(text: str, length: int = 16) -> str:
    """The first hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def check_no_file(folder: Path) -> None:
    """Raise a ValueError where a file is in the place of an output folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: a file is in the way of the output folder")


def check_new_file(path: Path) -> None:
    """Raise a ValueError where a file of results would be overwritten."""
    if path.exists():
        raise ValueError(f"{path} exists already; choose another folder with --out")


def write_text_atomic(path: Path, content: str) -> None:
    """Write `content` to a temporary file beside `path`, then rename it to `path`."""
    temporary = path.with_name(path.name + UNFINISHED_SUFFIX)
    temporary.write_text(content, "utf8")
    _atomic_replace(temporary, path)


def write_json(path: Path, value: object, **options: Any) -> None:
    """Write a value as JSON that people can read, as `write_text_atomic` does.

    Args:
        path: of the file.
        value: what `json.dumps` takes.
        options: further ones of `json.dumps`.
    """
    write_text_atomic(path, json.dumps(value, indent=1, **options) + "\n")


def _atomic_replace(temporary: Path, path: Path) -> None:
    """Rename a file or a folder to `path` once all of its content is on disk."""
    for inner in temporary.rglob("*"):
        fsync_path(inner)
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Rename a folder to `folder`. One that is there is moved aside first, and removed at the end.

    So one of the two is complete at any moment.
    """
    replaced = folder.with_name(folder.name + REPLACED_SUFFIX)
    if not folder.exists():
        _atomic_replace(temporary, folder)
        return
    shutil.rmtree(replaced, ignore_errors=True)
    os.replace(folder, replaced)
    _atomic_replace(temporary, folder)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder that becomes `folder` where the block succeeds, and is removed where it fails.

    Raises:
        ValueError: `folder` is a file, not empty, has no name or is where a disk is mounted, or
            another process is making it; or the folder for unfinished work has other content.
    """
    check_no_file(folder)
    if not folder.name:
        raise ValueError(f"{folder}: cannot be replaced; name a new folder, like ./corpus")
    _check_empty(folder)
    if folder.is_mount():
        raise ValueError(f"{folder}: a disk is mounted there, so name a new folder in it")
    folder = Path(os.path.realpath(folder))  # a link stays one
    work = folder.with_name(folder.name + UNFINISHED_SUFFIX)
    if work.is_dir() and not (work / LOCK_FILE).exists() and any(work.iterdir()):
        raise ValueError(f"{work}: is no unfinished folder, so it is not removed; rename it")
    with lock_folder(work):
        # `work` is renamed, or removed, with its lock file. A process that opened the file just
        # before then fails, because its folder is gone. Two could hold the lock only if a third
        # one made `work` again in that moment.
        try:
            _check_empty(folder)  # another process may have held the lock until now
            _remove_content(work)  # left by a process that was killed
            yield work
            _atomic_replace(work, folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        (folder / LOCK_FILE).unlink()


def _check_empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: not empty; choose another folder, or remove it")


def _remove_content(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process. A process that is killed releases it.

    Args:
        folder: created if it does not exist. The lock is its file `.lock`.

    Raises:
        ValueError: another process holds it. The message names that process.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text("utf8") or "another process"
        raise ValueError(
            f"{folder}: in use by {holder}; wait until it has ended, or choose another folder"
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", "utf8")
        yield
    finally:
        lock.release()  # The file stays: a process that removed it could remove another's lock.


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: a regular file.

    Raises:
        ValueError: the file cannot be read, is not JSON in UTF-8, or contains something else.
    """
    if not path.is_file():
        raise ValueError(f"{path}: not a file" if path.exists() else f"{path}: no such file")
    try:
        text = path.read_text("utf8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not text in UTF-8") from None
    return parse_json(text, str(path), dict)


def parse_json(text: str, source: str, kind: type[_Kind]) -> _Kind:
    """The value of a JSON text.

    Args:
        text: one JSON value.
        source: where the text is from, for the message of an error.
        kind: what the value must be, `dict` or any `object`.

    Raises:
        ValueError: the text is not JSON, is nested too deep, or its value is of another kind.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{source}: JSON that is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{source}: not JSON ({error})") from None
    if not isinstance(value, kind):
        raise ValueError(f"{source}: expected an object of JSON, got {type(value).__name__}")
    return value


def list_files(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders, sorted. Links to folders are followed."""
    found: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        place = os.path.realpath(root)
        if place in seen:  # a link to a folder around it
            folders.clear()
            continue
        folders.sort()  # of two names of one folder, the same one is found on each file system
        seen.add(place)
        found += [Path(root, name) for name in names]
    return sorted(found)


def expand_place(place: str) -> str:
    """A path, or another name of a source, with ~ and environment variables replaced."""
    return os.path.expanduser(os.path.expandvars(place))
