"""Fetching a tensor's value as an operator that never blocks.

>>> future = dtorch_ops.to_torch_async(torch.ones(2))  # returns at once
>>> future.get()
tensor([1., 1.])
"""

from . import _library as _library  # first: checks torch, loads the operators
from . import _build_info
from . import _compile as _compile
from . import _fake as _fake
from . import _logging as _logging
from . import _torchscript as _torchscript
from . import _vmap as _vmap
from . import functional as functional
from . import network as network
from . import profiler as profiler
from ._library import cmake_prefix_path
from .adapters import from_future
from .convert import to_torch, to_torch_async
from .devices import sync, sync_future
from .errors import (
    BrokenPromiseError,
    DTorchError,
    FutureAlreadyRetrievedError,
    PromiseAlreadySatisfiedError,
    RemoteError,
)
from .future import Future, TensorFuture, TreeFuture, VoidFuture
from .groups import as_completed, collect_all, collect_any, wait_all
from .pending import report_pending
from .promise import TensorPromise, VoidPromise
from .shared_memory import set_cache_limit, stats, trim

__version__: str = _build_info.VERSION

__all__ = [
    "BrokenPromiseError",
    "DTorchError",
    "Future",
    "FutureAlreadyRetrievedError",
    "PromiseAlreadySatisfiedError",
    "RemoteError",
    "TensorFuture",
    "TensorPromise",
    "TreeFuture",
    "VoidFuture",
    "VoidPromise",
    "as_completed",
    "cmake_prefix_path",
    "collect_all",
    "collect_any",
    "from_future",
    "report_pending",
    "set_cache_limit",
    "stats",
    "sync",
    "sync_future",
    "to_torch",
    "to_torch_async",
    "trim",
    "wait_all",
]
