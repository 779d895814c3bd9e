"""The products of a linear layer and of its gradients, with the bits of autograd.

They are those of mm and addmm in torch's derivatives.yaml. Which operand is transposed decides the last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in_features] @ weight [in_features, out_features], as the forward of transformers' Conv1D."""
    if bias is None:
        return x @ weight
    rows = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], len(bias))


def is_by_columns(matrix: Tensor, as_it_is: bool = True) -> bool:
    """`matrix`, or its transpose, lies column after column, so torch computes the transpose of its gradient."""
    inner, outer = matrix.stride() if as_it_is else matrix.stride()[::-1]
    return inner == 1 and outer == matrix.shape[0 if as_it_is else 1]


def input_grad(dy: Tensor, matrix: Tensor, *, is_by_columns: bool) -> Tensor:
    """dx [..., in_features] of y = x @ matrix. is_by_columns: whether x is."""
    rows = _rows(dy)
    dx = matrix.mm(rows.t()).t() if is_by_columns else rows.mm(matrix.t())
    return dx.view(*dy.shape[:-1], len(matrix)) if dy.ndim != 2 else dx


def weight_grad(x: Tensor, dy: Tensor, *, is_by_columns: bool, is_transposed: bool) -> Tensor:
    """dW, in the dtype of dy, from x [..., in_features] and dy [..., out_features].

    is_by_columns: whether the matrix is by which x was multiplied.
    is_transposed: the weight is [in_features, out_features]; else [out_features, in_features].
    """
    rows, dy = _rows(x), _rows(dy)
    grad = dy.t().mm(rows).t() if is_by_columns else rows.t().mm(dy)
    return grad if is_transposed else grad.t()


def bias_grad(dy: Tensor, *, is_flat: bool) -> Tensor:
    """db [out_features]. is_flat: the bias was added to [rows, out_features]."""
    if is_flat or dy.ndim < 3:
        return _rows(dy).sum(0)
    return dy.sum(list(range(dy.ndim - 1)))  # the order of additions depends on strides


def _rows(tensor: Tensor) -> Tensor:
    """[..., features] -> [rows, features]"""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


__all__ = ["bias_grad", "input_grad", "is_by_columns", "linear_transposed", "weight_grad"]
