"""Saves the TorchScript model that scripted_model.cpp runs: python export_model.py model.pt."""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor

import dtorch_ops as dtorch_ops  # registers the operators


class Model(torch.nn.Module):
    """Gives its hidden layer back, and its result to whoever waits for the promise."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(3, 2)
        self.out = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]]))
            self.hidden.bias.fill_(0.5)
            self.out.weight.fill_(10.0)

    def forward(self, x: Tensor, promise: torch.classes.dtorch.TensorPromise) -> Tensor:
        hidden = torch.relu(self.hidden(x))
        snapshot = torch.ops.dtorch.get_tensor_async(hidden, copy=True)  # returns at once
        result = self.out(hidden.mul_(2))
        torch.jit.wait(torch.ops.dtorch.sync())
        torch.ops.dtorch.get_tensor(result, promise)
        return torch.jit.wait(snapshot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the file to write")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is being retired
        torch.jit.save(torch.jit.script(Model().eval()), arguments.path)


if __name__ == "__main__":
    main()
