"""The laws of crosslayer.testing, over crosslayer's own methods."""

from crosslayer.testing.laws import *  # noqa: F403
