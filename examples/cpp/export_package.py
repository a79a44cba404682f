"""Compiles the model that packaged_model.cpp runs: python export_package.py model.pt2."""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor

from dtorch_ops.functional import get_start, get_wait


class Model(torch.nn.Module):
    """Gives its hidden layer back as it was before the next one has worked on it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(3, 2)
        self.out = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]]))
            self.hidden.bias.fill_(0.5)
            self.out.weight.fill_(10.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.hidden(x))
        transfer = get_start(hidden, "cpu")
        result = self.out(hidden.mul_(2))  # beside the copy, on an accelerator
        return get_wait(transfer), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the file to write, *.pt2")
    path = parser.parse_args().path
    rows = torch.export.Dim("rows")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the compiler, on parts of torch
        program = torch.export.export(
            Model().eval(), (torch.ones(2, 3),), dynamic_shapes={"x": {0: rows}}
        )
        torch._inductor.aoti_compile_and_package(program, package_path=path)


if __name__ == "__main__":
    main()
