"""What was measured, as rows of a .csv file: each has its conditions, so that files of many machines can be joined."""

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from crosslayer import __version__
from crosslayer.ops import dispatch

Row = dict[str, Any]
CONDITIONS = (
    "date",
    "device",
    "threads",
    "torch",
    "triton",
    "crosslayer",
    "commit",
    "kernels",
    "command",
)
MISSING = "not measured"


def conditions(device: torch.device, command: str) -> Row:
    names = {
        "cuda": torch.cuda.get_device_name,
        "cpu": lambda _: processor(),
        "meta": lambda _: "none at hand",
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": names[device.type](device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": installed("triton") or "none",
        "crosslayer": __version__,
        "commit": commit(),
        "kernels": "yes" if device.type in dispatch.kernel_devices else "no",
        "command": command,
    }


def append(file: Path, columns: Iterable[str], rows: Iterable[Row]) -> None:
    """Add rows to a file, or begin it. What a row has no value for was not measured.

    Raises:
        ValueError: the file is one of other columns.
    """
    head = header(columns)
    new = not file.exists()
    if not new:
        check(file, columns)
    with file.open("a", newline="", encoding="utf8") as opened:
        writer = csv.DictWriter(opened, head, restval=MISSING, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({key: written(value) for key, value in row.items()})


def check(file: Path, columns: Iterable[str]) -> None:
    """Raise a ValueError where a file that is there cannot take rows of these columns."""
    if file.exists():
        with file.open(newline="", encoding="utf8") as opened:
            found = next(csv.reader(opened), [])
        if found != header(columns):
            raise ValueError(
                f"{file} has other columns than are measured now; move it away, or give another --out"
            )


def header(columns: Iterable[str]) -> list[str]:
    return [*CONDITIONS, *columns, "note"]


def written(value: Any) -> str:
    if value is None:
        return MISSING
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def installed(package: str) -> str | None:
    """The version of a package, or None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The CPU's name and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), platform.machine())}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of this checkout, and whether it was changed; $COMMIT where the checkout came without its history."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return os.environ.get("COMMIT", "unknown")
    return found.stdout.strip() or os.environ.get("COMMIT", "unknown")
