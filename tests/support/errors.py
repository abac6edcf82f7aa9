"""What a call says that is refused."""

from collections.abc import Callable
from typing import Any

import pytest


def error_message(function: Callable, *arguments: Any, **options: Any) -> str:
    """The message of its ValueError, which is one line."""
    with pytest.raises(ValueError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)
