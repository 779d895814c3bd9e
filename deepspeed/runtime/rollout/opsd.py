"""`deepspeed.runtime.rollout.opsd`: targets on the tokens of responses, and a loss against a teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ...missing import placeholder
from .base import RolloutBatch


@final
@dataclass(frozen=True)
class ResponseTokenBatch:
    """Sequences with the targets of their responses. Logits of token i belong to `target_ids[:, i]`.

    Attributes:
        input_ids, attention_mask: [sequences, tokens].
        target_ids, response_mask: [sequences, tokens - 1]; the mask is true on tokens of a response.
    """

    input_ids: Tensor
    attention_mask: Tensor
    target_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """The targets of what a generator returned.

        Raises:
            ValueError: the tensors are on several devices, or a response starts outside its sequence.
        """
        ids, mask, first = rollout.input_ids, rollout.attention_mask, rollout.response_start_idx
        if len({ids.device, mask.device, first.device}) > 1:
            raise ValueError("the tensors of the rollout are on several devices; move them to one")
        if first.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"response_start_idx of {first.dtype}: must be int32 or int64")
        length = rollout.seq_len
        if bool(((first < 1) | (first > length)).any()):
            raise ValueError(f"response_start_idx must be from 1 to {length}")
        columns = torch.arange(1, length, device=ids.device)
        return cls(ids, mask, ids[:, 1:], mask[:, 1:].bool() & (columns >= first[:, None]))

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """The logits that belong to `target_ids`, [sequences, tokens - 1, vocabulary].

        Raises:
            ValueError: `logits` is not [sequences, tokens, vocabulary].
        """
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)}: the batch and sequence dimensions must be those of "
                f"input_ids, {tuple(self.input_ids.shape)}, and a third one the vocabulary"
            )
        return logits[:, :-1]


@final
@dataclass(frozen=True)
class JSDLossOutput:
    """A loss, [], and the parts of its mean: for a mean over ranks."""

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(  # noqa: PLR0913 (DeepSpeed's arguments)
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """The mean over tokens of beta KL(teacher, m) + (1 - beta) KL(student, m), m = (1 - beta) s + beta t.

    Args:
        student_logits, teacher_logits: [sequences, tokens, vocabulary].
        response_mask: [sequences, tokens]; the tokens that count.
        beta: 0: KL(teacher, student); 1: KL(student, teacher).
        teacher_top_k: entries of the vocabulary that count, those that the teacher finds most likely.
        pointwise_clip: the largest term of one entry.
    Raises:
        ValueError: shapes or numbers that do not fit.
    """
    _check(student_logits, teacher_logits, response_mask)
    _check_numbers(beta, temperature, teacher_top_k, pointwise_clip, student_logits.shape[-1])
    student, teacher = student_logits / temperature, teacher_logits / temperature
    if teacher_top_k is not None:
        chosen = teacher.topk(teacher_top_k, dim=-1).indices
        student, teacher = student.gather(-1, chosen), teacher.gather(-1, chosen)
    terms = _terms(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    if pointwise_clip is not None:
        terms = terms.clamp(max=pointwise_clip)
    counts = response_mask.bool()
    total = (terms.sum(-1) * counts).sum()
    number = counts.sum()
    return JSDLossOutput(total / number.clamp(min=1), total, number)


def _terms(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence of each entry, from logarithms of probabilities."""
    if beta == 0:
        return teacher.exp() * (teacher - student)
    if beta == 1:
        return student.exp() * (student - teacher)
    mean = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * teacher.exp() * (teacher - mean) + (1 - beta) * student.exp() * (student - mean)


def _check(student: Tensor, teacher: Tensor, mask: Tensor) -> None:
    if student.dim() != 3 or student.shape != teacher.shape:
        raise ValueError(
            "student_logits and teacher_logits must have one shape, [sequences, tokens, vocabulary]"
        )
    if mask.shape != student.shape[:2]:
        raise ValueError("response_mask must have the shape of the logits without the vocabulary")


def _check_numbers(
    beta: float, temperature: float, top_k: int | None, clip: float | None, size: int
) -> None:
    if not 0 <= beta <= 1:
        raise ValueError(f"beta = {beta}: must be from 0 to 1")
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: must be positive")
    if top_k is not None and not 0 < top_k <= size:
        raise ValueError(f"teacher_top_k = {top_k}: must be positive, and at most {size}")
    if clip is not None and clip < 0:
        raise ValueError(f"pointwise_clip = {clip}: must not be negative")


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
