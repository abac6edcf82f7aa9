"""Triton's interpreter, made to round as GPUs do, and to count the bytes a kernel loads and stores."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np


@contextmanager
def rounding() -> Iterator[None]:
    """Within it, float32 becomes bfloat16 by rounding to the nearest, ties to even; the interpreter cuts digits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def nearest(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)

    interpreter._convert_float = nearest
    try:
        yield
    finally:
        interpreter._convert_float = convert


@contextmanager
def counted() -> Iterator[SimpleNamespace]:
    """Within it, `.bytes` counts what kernels load and store; lanes that are masked off move nothing."""
    from triton.runtime.interpreter import InterpreterBuilder

    count = SimpleNamespace(bytes=0)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def note(pointers: Any, mask: Any) -> None:
        count.bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        note(ptrs, mask)
        return load(self, ptrs, mask, *rest, **named)

    def create_masked_store(
        self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        note(ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **named)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store
    try:
        yield count
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
