"""Lines of a program's own in the trace of a fake GPU."""

import ctypes
from functools import cache


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def mark(text: str) -> None:
    library().fake_gpu_mark(text.encode())
