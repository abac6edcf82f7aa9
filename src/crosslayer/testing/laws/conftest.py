"""The fixtures of the laws, where pytest runs this folder."""

from .shared import same_start  # noqa: F401
