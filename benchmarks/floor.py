"""The floor that the file backend is measured against: shared memory, a futex and one memcpy.

The consumer makes a :class:`Floor`; the producer opens it by its path. The memory is a memfd, whose
pages are those of ``/dev/shm``, without its limit in a container.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import torch

from . import native

_BYTES_AT = 128  # floor.cpp knows it too


@functools.cache
def _library() -> ctypes.CDLL:
    library = native.load("floor.cpp")
    library.FloorPut.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.FloorPut.restype = ctypes.c_int64
    library.FloorTake.argtypes = [ctypes.c_void_p]
    library.FloorTake.restype = ctypes.c_int64
    return library


class Floor:
    """One end of it, in one process. Holds one value at a time.

    Args:
        capacity: bytes of the largest value.
        path: of the other process's end; None makes new memory.
    """

    def __init__(self, capacity: int, path: str | None = None) -> None:
        self._library = _library()
        size = _BYTES_AT + capacity
        if path is None:
            self._descriptor = os.memfd_create("floor")
            os.ftruncate(self._descriptor, size)
        else:
            self._descriptor = os.open(path, os.O_RDWR)
        memory = mmap.mmap(self._descriptor, size)  # unmapped when the last tensor of it goes
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def put(self, tensor: torch.Tensor) -> int:
        """Hands over a contiguous tensor; when that began, in ns of ``time.monotonic_ns``."""
        began: int = self._library.FloorPut(
            self._bytes.data_ptr(), tensor.data_ptr(), tensor.nbytes
        )
        return began

    def take(self) -> int:
        """Blocks until something was put; when it was there, in ns of ``time.monotonic_ns``."""
        ended: int = self._library.FloorTake(self._bytes.data_ptr())
        return ended

    def value(self, size: int) -> torch.Tensor:
        """The bytes that were put last, which lie in the shared memory."""
        return self._bytes[_BYTES_AT : _BYTES_AT + size]

    def close(self) -> None:
        os.close(self._descriptor)
        del self._bytes
