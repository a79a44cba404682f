"""Tensors of every kind that a promise carries, by name: both ends make them alike."""

from __future__ import annotations

import functools
import warnings

import torch


def _every_dtype() -> list[torch.dtype]:
    found = [getattr(torch, name) for name in dir(torch)]
    dtypes = sorted({d for d in found if isinstance(d, torch.dtype)}, key=str)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        return [d for d in dtypes if not torch.empty(0, dtype=d).is_quantized]


def _patterned(dtype: torch.dtype) -> torch.Tensor:
    """Bytes that tell their places, whatever the elements mean: 3 x 4 of them."""
    if dtype is torch.bool:
        return torch.arange(12).fmod(3).to(torch.bool).reshape(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = torch.empty(0, dtype=dtype).element_size()
        data = torch.arange(1, 12 * size + 1).mul(7).fmod(251).to(torch.uint8)
        return data.reshape(3, 4 * size).view(dtype)


def _complex() -> torch.Tensor:
    return torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0)).reshape(2, 3)


@functools.cache
def cases() -> dict[str, torch.Tensor]:
    dtypes = _every_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = {str(d).removeprefix("torch."): _patterned(d) for d in dtypes}
        for dtype in dtypes:
            # Of those that torch itself can rearrange.
            try:
                torch.empty(2, 2, dtype=dtype).t().contiguous()
            except NotImplementedError:
                continue
            cases[f"transposed {dtype}"] = _patterned(dtype).t()
    sizes = (1, 12, 127, 128, 129, 4095, 4096, 4097)
    return cases | {
        "no dimension": torch.tensor(1.5),
        "no dimension, a view": torch.arange(9.0)[4],
        "(0,)": torch.empty(0),
        "(0, 5)": torch.empty(0, 5),
        "(3, 0, 2)": torch.empty(3, 0, 2, dtype=torch.int16),
        "empty with 64 dimensions": torch.empty((1,) * 63 + (0,)),
        "8 dimensions": torch.arange(256.0).reshape((2,) * 8),
        "9 dimensions": torch.arange(512.0).reshape((2,) * 9),
        "64 dimensions": torch.arange(4.0).reshape((1,) * 62 + (2, 2)),
        "64 dimensions, transposed": torch.arange(4.0).reshape((2, 2) + (1,) * 62).transpose(0, 63),
        **{f"{n} bytes": torch.arange(n).to(torch.uint8) for n in sizes},
        "strided": torch.arange(100.0)[::7],
        "flipped": torch.arange(10.0).flip(0),
        "channels last": torch.arange(120.0)
        .reshape(2, 3, 4, 5)
        .contiguous(memory_format=torch.channels_last),
        "overlapping": torch.arange(9.0).as_strided((4, 3), (2, 1)),
        "expanded": torch.arange(3.0).expand(4, 3),
        "expanded from one": torch.tensor(2.0).expand(1000, 1000),
        "view of much": torch.arange(1_000_000.0)[10:12],
        "conjugate": _complex().conj(),
        "conjugate, transposed": _complex().conj().t(),
        "negative view": _complex().conj().imag,
        "real view": _complex().real,
        "requires grad": torch.ones(3, requires_grad=True),
        "not a leaf": torch.ones(300, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "shared": torch.arange(5.0).share_memory_(),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
        "large": torch.arange(3_000_000.0),
        "large and transposed": torch.arange(1_000_000.0).reshape(1000, 1000).t(),
    }


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, which torch.equal compares for every dtype, and for NaNs."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolved = tensor.detach().resolve_conj().resolve_neg()
        if not resolved.is_contiguous():
            resolved = resolved.contiguous()
        return resolved.reshape(-1).view(torch.uint8) if resolved.numel() else resolved


class Subclassed(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError


#: What has no plain elements, and what the refusal says to send instead.
UNSENDABLE = {
    "sparse": "to_dense",
    "compressed": "to_dense",
    "quantised": "int_repr",
    "meta": "no data",
    "nested": "to_padded_tensor",
    "jagged": "t.values()",
    "subclass": "as_subclass",
}


def unsendable(name: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        parts = [torch.ones(2), torch.ones(3)]
        makers = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "compressed": lambda: torch.eye(3).to_sparse_csr(),
            "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "meta": lambda: torch.empty(2, device="meta"),
            "nested": lambda: torch.nested.nested_tensor(parts),
            "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
            "subclass": lambda: torch.Tensor._make_subclass(Subclassed, torch.ones(2)),
        }
        return makers[name]()


NAMES = list(cases())
