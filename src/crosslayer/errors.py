"""What an error says."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the memory of a GPU or of the machine does not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch's of the machine's memory; CUDA's; cuBLAS's
    words = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def error_in_one_line(error: BaseException) -> str:
    """An error's message, or its class where it has none, and its notes."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"  # without "[Errno 17]"
    notes = " ".join(f"({note})" for note in getattr(error, "__notes__", ()))
    return " ".join(f"{text} {notes}".split())


def error_with_class(error: BaseException) -> str:
    """An error in one line that begins with its class."""
    name = type(error).__name__
    text = error_in_one_line(error)
    return name if text == name else f"{name}: {text}"  # An error without words is its name.
