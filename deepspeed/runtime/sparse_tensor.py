"""`deepspeed.runtime.sparse_tensor`: the rows of an embedding's sparse gradient, with their numbers."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ..errors import methods_raise_theirs
from ..missing import placeholder


@final
@methods_raise_theirs
class SparseTensor:
    """Rows `values` (rows, columns) with numbers `indices` (rows) of a matrix of size `dense_size`.

    Args:
        dense_tensor: a sparse tensor of torch; a dense one is taken as its rows that are not 0.
    """

    is_sparse = True
    indices: Tensor
    values: Tensor
    dense_size: list[int]

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        if dense_tensor is None:
            return
        self.dtype = dense_tensor.dtype
        self.dense_size = list(dense_tensor.size())
        if dense_tensor.is_sparse:
            rows = dense_tensor.coalesce()
            self.indices, self.values = rows.indices().flatten(), rows.values()
        else:
            self.indices = dense_tensor.abs().sum(dim=1).nonzero().flatten()
            self.values = dense_tensor[self.indices]

    def to_coo_tensor(self) -> Tensor:
        """torch's sparse tensor."""
        return torch.sparse_coo_tensor(self.indices.unsqueeze(0), self.values, self.dense_size)

    def to_dense(self) -> Tensor:
        """The whole matrix; a row that is there twice is summed."""
        whole = self.values.new_zeros(self.dense_size)
        return whole.index_add_(0, self.indices, self.values)

    def add(self, b: SparseTensor) -> None:
        """Append the rows of `b`, so that the matrix is the sum.

        Raises:
            UsageError: the sizes differ.
        """
        if self.dense_size != b.dense_size:
            raise UsageError(f"SparseTensor.add: sizes {self.dense_size} and {b.dense_size} differ")
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])

    def sparse_size(self) -> tuple[int, int]:
        """(numbers kept here, elements of the matrix)."""
        return self.indices.numel() + self.values.numel(), self.dense_size[0] * self.dense_size[1]

    @staticmethod
    def type() -> str:
        return "deepspeed.SparseTensor"

    def __repr__(self) -> str:
        return f"SparseTensor(rows={self.indices.numel()}, dense_size={self.dense_size})"


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
