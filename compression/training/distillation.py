"""The loss of a student that learns from a teacher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...utils.errors import UsageError


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    student_hidden: Sequence[Tensor] = (),
    teacher_hidden: Sequence[Tensor] = (),
    hidden_weight: float = 1.0,
) -> Tensor:
    """T^2 KL(teacher || student) of softmax(logits / T), plus mean squared differences of hidden states.

    Args:
        student_logits, teacher_logits: [..., classes]; no gradient goes to the teacher.
        temperature: T, above 0.
        mask: [...], of the logits without classes: which positions count; None: all.
        student_hidden, teacher_hidden: as many of each, of equal shapes in pairs.
        hidden_weight: of the sum over the pairs.
    Returns: [] fp32, the mean over positions.
    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015, https://arxiv.org/abs/1503.02531.
    Raises UsageError: shapes or numbers differ.
    """
    _check_shapes("logits", student_logits, teacher_logits)
    if len(student_hidden) != len(teacher_hidden):
        raise UsageError(
            f"distillation_loss: {len(student_hidden)} hidden states of the student and {len(teacher_hidden)} "
            "of the teacher; pass those of the layers that correspond"
        )
    if mask is not None and mask.shape != student_logits.shape[:-1]:
        raise UsageError(
            f"distillation_loss: mask has the shape {list(mask.shape)}: it must be that of the logits without "
            f"classes, {list(student_logits.shape[:-1])}"
        )
    if not temperature > 0:
        raise UsageError(f"distillation_loss: temperature = {temperature}: must be above 0")
    ours = F.log_softmax(student_logits.float() / temperature, dim=-1)
    theirs = F.log_softmax(teacher_logits.detach().float() / temperature, dim=-1)
    loss = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1) * temperature**2
    if mask is None:
        total = loss.mean()
    else:
        weight = mask.to(loss.dtype)
        total = (loss * weight).sum() / weight.sum().clamp(min=1)
    for ours, theirs in zip(student_hidden, teacher_hidden, strict=True):
        _check_shapes("hidden states", ours, theirs)
        total = total + hidden_weight * F.mse_loss(ours.float(), theirs.detach().float())
    return total


def _check_shapes(what: str, student: Tensor, teacher: Tensor) -> None:
    if (
        not (torch.is_tensor(student) and torch.is_tensor(teacher))
        or student.shape != teacher.shape
    ):
        shapes = [list(getattr(one, "shape", ())) for one in (student, teacher)]
        raise UsageError(
            f"distillation_loss: {what} of student and teacher have the shapes {shapes[0]} and {shapes[1]}: "
            "they must be equal; project the smaller ones first"
        )


__all__ = ["distillation_loss"]
