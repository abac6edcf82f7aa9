"""Triton's interpreter: rounding and adding as GPUs do; what kernels load and store, and where."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor


@contextmanager
def round_to_nearest() -> Iterator[None]:
    """Make float32 -> bfloat16 round to nearest, ties to even; the interpreter truncates."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_rounding(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)

    interpreter._convert_float = convert_rounding
    try:
        yield
    finally:
        interpreter._convert_float = convert


@contextmanager
def add_in_trees() -> Iterator[None]:
    """Make sums along any axis pairwise; the interpreter adds rows of a matrix one by one.

    A GPU adds what a thread has, and then the threads' sums in a tree.
    """
    from triton.runtime.interpreter import ReduceOps

    add = ReduceOps.sum

    def add_pairwise(self: Any, x: Any) -> Any:
        if self.axis is None:
            return add(self, x)
        # numpy adds pairwise along an axis that is contiguous.
        rows = np.ascontiguousarray(np.moveaxis(x.handle.data, self.axis, -1))
        sums = rows.sum(-1)
        if self.keep_dims:
            sums = np.expand_dims(sums, self.axis)
        return self.to_tensor(sums, x.dtype)

    ReduceOps.sum = add_pairwise
    try:
        yield
    finally:
        ReduceOps.sum = add


@contextmanager
def patch_once() -> Iterator[None]:
    """Replace the functions of triton's language once.

    The interpreter does it for each launch and for each function that a kernel calls, which is half
    of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    scopes: dict[tuple[bool, ...], Any] = {}

    def patch_new_modules(fn: Any) -> Any:
        values = [id(value) for value in fn.__globals__.values()]
        modules = tuple(id(module) in values for module in (tl, tl.core))
        if modules not in scopes:
            scopes[modules] = patch(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_new_modules
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        for scope in reversed(scopes.values()):
            scope.restore()


@contextmanager
def count_traffic() -> Iterator[SimpleNamespace]:
    """Count in `.bytes` what kernels load and store; masked lanes move nothing."""
    traffic = SimpleNamespace(bytes=0)

    def count(pointers: Any, mask: Any) -> None:
        traffic.bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    with _watch_accesses(count):
        yield traffic


@contextmanager
def stay_within(tensors: list[Tensor]) -> Iterator[None]:
    """Raise an AssertionError where a kernel loads or stores outside the memory of the tensors."""
    storages = [t.untyped_storage() for t in tensors]
    ranges = sorted((x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages)
    starts, ends = np.array(ranges, dtype=np.uint64).T

    def check(pointers: Any, mask: Any) -> None:
        at = pointers.data[mask.data]
        nearest = np.searchsorted(starts, at, "right").astype(np.int64) - 1
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        assert (nearest >= 0).all() and (at + size <= ends[nearest]).all(), "of no tensor"

    with _watch_accesses(check):
        yield


@contextmanager
def _watch_accesses(watch: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call a function with the pointers and the mask of every load and store."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        watch(ptrs, mask)
        return load(self, ptrs, mask, *args, **kwargs)

    def create_masked_store(
        self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        watch(ptrs, mask)
        return store(self, ptrs, value, mask, *args, **kwargs)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store
    try:
        yield
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
