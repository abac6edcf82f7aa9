"""Results as rows of .csv files. Each row states the conditions of its measurement."""

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
    *("date", "device", "threads", "torch", "triton"),
    *("crosslayer", "commit", "kernels", "command"),
)
NOT_MEASURED = "not measured"


def describe_conditions(device: torch.device, command: str) -> Row:
    """The columns `CONDITIONS`."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "crosslayer": __version__,
        "commit": _git_commit(),
        "kernels": "yes" if device.type in dispatch.kernel_devices else "no",
        "command": command,
    }


def append_row(file: Path, columns: Iterable[str], row: Row) -> None:
    """Append a row to a .csv file, or begin the file. A missing value is "not measured".

    Raises:
        ValueError: the file has other columns.
    """
    check_columns(file, columns)
    is_new = not file.exists()
    with file.open("a", newline="", encoding="utf8") as stream:
        writer = csv.DictWriter(stream, _header(columns), restval=NOT_MEASURED, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow({key: _format_value(value) for key, value in row.items()})


def read_rows(file: Path) -> list[Row]:
    """The rows of a .csv file that were measured; none where there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf8") as stream:
        return [row for row in csv.DictReader(stream) if not row["note"]]


def check_columns(file: Path, columns: Iterable[str]) -> None:
    """Raise a ValueError if an existing file has other columns."""
    if not file.exists():
        return
    if not file.is_file():
        raise ValueError(f"{file}: not a file; choose another --out")
    with file.open(newline="", encoding="utf8", errors="replace") as stream:
        header = next(csv.reader(stream), [])
    if header != _header(columns):
        raise ValueError(f"{file} has other columns; move it away, or choose another --out")


def _header(columns: Iterable[str]) -> list[str]:
    return [*CONDITIONS, *columns, "note"]


def _format_value(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _processor_name() -> str:
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
    return f"{name}, {os.cpu_count()} cores"


def _git_commit() -> str:
    """The commit of this checkout, or $COMMIT for a copy without its history."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        described = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        described = ""
    return described or os.environ.get("COMMIT", "unknown")
