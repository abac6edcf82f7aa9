"""What a call says that is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def error_message(function: Callable, *arguments: Any, **options: Any) -> str:
    """The message of its ValueError, which is one line."""
    with pytest.raises(ValueError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_refused(load: Callable, folder: Path, message: str) -> None:
    """Assert that a folder cannot be loaded, with a message that the pattern is found in."""
    assert re.search(message, error := error_message(load, folder)), error


def change_weights(folder: Path, change: Callable) -> None:
    """Let `change` edit the tensors by name of a model's folder."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
