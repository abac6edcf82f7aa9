"""Another connection for a transformers model, leaving its classes, module paths and state-dict keys as they are."""

from .connect import connect

__all__ = ["connect"]
