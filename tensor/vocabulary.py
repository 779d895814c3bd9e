"""Vocabularies that are cut: each tensor rank has some rows of the embedding and some columns of the logits.

    ids ── own rows, zeros for other ids ──sum── x          one sum of [tokens, width]
    x ── own columns of the logits ── loss                  of [tokens]: the largest logit of each rank, and
                                                            sums of the exponentials and of the target's logit

Logits are never gathered for the loss. A rank keeps [tokens, own vocabulary] of them. Source: Shoeybi et al.,
Megatron-LM, 2019, section 3. They send the largest logits as a sum of their own kind; here they are gathered.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.boxes import Range
from ..utils.errors import UsageError
from .exchange import Exchange

KIND = "sums of losses"
CHECKED_BACKWARDS = 2
LABELS = ("labels", "targets", "target", "label")


def own_rows(ids: Tensor, own_range: Range, size: int) -> tuple[Tensor, Tensor]:
    """(numbers of own rows [...], which ids have one [...]) of `ids` [...] in a vocabulary of `size`.

    Ids of other ranks become 0. What is outside of the vocabulary stays as it is, so that a look-up refuses it.
    """
    start, stop = own_range
    mine = (ids >= start) & (ids < stop)
    outside = (ids < 0) | (ids >= size)
    rows = torch.where(mine, ids - start, torch.where(outside, ids, 0))
    return rows, mine


@final
class Vocabulary:
    """The columns of the logits that this rank has. One for each head that is cut."""

    def __init__(self, exchange: Exchange, widths: Sequence[int]) -> None:
        """widths: of the columns of each rank."""
        rank = exchange.collectives.rank
        start = sum(widths[:rank])
        self.exchange = exchange
        self.widths = tuple(widths)
        self.own: Range = (start, start + widths[rank])
        self.size = sum(widths)
        self._is_used = False  # a loss was computed from own columns
        self.has_labels: bool | None = (
            None  # of the forward that runs; None: its forward takes none
        )

    def logits(self, columns: Tensor, *, is_training: bool) -> Tensor:
        """[..., own columns], for `cross_entropy`; [..., all columns] where this forward computes no loss."""
        keeps = is_training if self.has_labels is None else self.has_labels
        _thread.latest = weakref.ref(self) if keeps else _Thread.latest
        if not keeps:
            return self.exchange.gather(columns, self.widths)
        if columns.requires_grad:
            columns.register_hook(self._check_used)  # type: ignore[no-untyped-call]
            node: Any = columns.grad_fn
            if node is not None:
                node.metadata[_HEAD] = self
        return columns

    def _check_used(self, _: Tensor) -> None:
        """In backward: no loss came from own columns, so the model has treated them as all."""
        if not self._is_used:
            raise UsageError(
                "tensor_parallel.vocab_parallel_lm_head = true: a rank has some columns of the logits, and the "
                "model computes its loss without xds.tensor.cross_entropy; use it, or set "
                "vocab_parallel_lm_head to false"
            )

    def highest(self, columns: Tensor) -> Tensor:
        """[N] of own columns -> the largest over the ranks."""
        group = self.exchange.collectives
        every = [torch.empty_like(columns) for _ in range(group.world_size)]
        group.all_to_all(every, [columns] * len(every), what=self._what, kind=KIND).wait()
        return torch.stack(every).amax(0)

    def sums(self, *terms: Tensor) -> Tensor:
        """Several [N] of own columns -> their sums over the ranks, [number of terms, N]. One message."""
        sums = torch.stack(terms)
        self.exchange.collectives.sum(sums, what=self._what, kind=KIND)
        return sums

    @property
    def _what(self) -> str:
        return f"the logits of {self.exchange.what}"

    def losses(self, logits: Tensor, targets: Tensor, ignored: int, smoothing: float) -> Tensor:
        """The loss of each token [N], zero where it is ignored; `logits` [N, own columns], `targets` [N]."""
        self._is_used = True
        losses: Tensor = _Losses.apply(logits, targets, self, ignored, smoothing)  # type: ignore[no-untyped-call]
        return losses


_HEAD = "xds.tensor.Vocabulary"  # in the metadata of the node that has computed own columns: whose they are
_NODES = 64  # between logits and their loss: functions of single elements, and their other inputs


@final
class _Thread(threading.local):
    """latest: whose own columns this thread has computed last.

    That leads from logits to their head where autograd does not: without gradients, and behind a reentrant
    checkpoint. There the loss is computed in the forward that has called the head.
    """

    latest: Callable[[], Vocabulary | None] = staticmethod(lambda: None)


_thread = _Thread()


def check_uses_of_logits(loss: Tensor) -> bool:
    """`loss` comes from own columns. Of those it may use only what `Vocabulary.losses` returns.

    Raises:
        UsageError: it uses others, so a rank would take its columns for all.
    """
    uses_losses = False
    for node in _behind(loss, around=_LOSSES):
        uses_losses |= node.name() == _LOSSES
        if _HEAD in node.metadata:
            raise UsageError(
                "tensor_parallel.vocab_parallel_lm_head = true: a rank has some columns of the logits, and a "
                "part of the loss is computed from them without xds.tensor.cross_entropy; set "
                "vocab_parallel_lm_head to false"
            )
    return uses_losses


def _behind(tensor: Tensor, around: str = "") -> Iterator[Any]:
    """The nodes that `tensor` comes from, the nearest first; none behind those named `around`."""
    waiting: deque[Any] = deque([] if tensor.grad_fn is None else [tensor.grad_fn])
    seen: set[Any] = {None, *waiting}
    while waiting:
        node = waiting.popleft()
        yield node
        if node.name() != around:
            following = [after for after, _ in node.next_functions if after not in seen]
            seen.update(following)
            waiting += dict.fromkeys(following)


def _vocabulary_of(logits: Tensor) -> Vocabulary | None:
    """Whose own columns `logits` are; None: they have all columns."""
    near = (node.metadata.get(_HEAD) for node in islice(_behind(logits), _NODES))
    vocabulary = next((head for head in near if head is not None), None) or _thread.latest()
    is_own = vocabulary is not None and logits.shape[-1] == vocabulary.own[1] - vocabulary.own[0]
    return vocabulary if is_own else None


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        ignored: int,
        smoothing: float,
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        is_valid = targets != ignored
        rows, mine = own_rows(torch.where(is_valid, targets, 0), vocabulary.own, vocabulary.size)
        highest = vocabulary.highest(wide.amax(1))
        wide = wide - highest[:, None]
        at_target = wide.gather(1, rows[:, None])[:, 0].where(mine, 0)
        terms = [wide.exp().sum(1), at_target, *([wide.sum(1)] if smoothing else [])]
        sums = vocabulary.sums(*terms)
        log_sum = sums[0].log()
        losses = log_sum - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_sum - sums[2] / vocabulary.size)
        ctx.save_for_backward(logits, rows, mine & is_valid, is_valid, log_sum + highest)
        ctx.smoothing, ctx.size = smoothing, vocabulary.size
        return losses.where(is_valid, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, rows, mine, is_valid, log_sum = ctx.saved_tensors
        # the probabilities of own columns
        grad_logits = logits.to(log_sum.dtype).sub(log_sum[:, None]).exp_()
        if ctx.smoothing:
            grad_logits.sub_(ctx.smoothing / ctx.size)
        share = mine.to(grad_logits.dtype).mul_(ctx.smoothing - 1)
        grad_logits.scatter_add_(1, rows[:, None], share[:, None])
        grad_logits.mul_((grad * is_valid)[:, None])
        return grad_logits.to(logits.dtype), None, None, None, None


_LOSSES = f"{_Losses.__name__}Backward"


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `torch.nn.functional.cross_entropy`, also of logits whose columns are cut over tensor ranks.

    Args:
        logits: [N, columns] or [columns]. With `tensor_parallel.vocab_parallel_lm_head` these are what the
            head has returned, possibly after functions of single elements; otherwise all columns.
        labels: [N] or []: numbers of classes in the whole vocabulary.
        ignore_index: labels with this number have no loss.
        reduction: "mean" over the labels that count, "sum" or "none".

    Raises:
        UsageError: labels are not numbers of classes, or a shape does not fit; for logits that are cut.
    """
    vocabulary = _vocabulary_of(logits)
    if vocabulary is None:
        return F.cross_entropy(
            logits,
            labels,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(
            f"xds.tensor.cross_entropy: reduction = {reduction!r}: must be mean, sum or none"
        )
    if (
        labels.is_floating_point()
        or logits.dim() not in (1, 2)
        or labels.shape != logits.shape[:-1]
    ):
        raise UsageError(
            f"xds.tensor.cross_entropy: logits are {list(logits.shape)}, labels {list(labels.shape)} of "
            f"{labels.dtype}; where the vocabulary is cut, pass logits [N, columns] and one label for each row"
        )
    rows = logits if logits.dim() == 2 else logits[None]
    flat = labels.reshape(-1)
    losses = vocabulary.losses(rows, flat, ignore_index, label_smoothing)
    if reduction == "none":
        loss = losses.view(labels.shape)
    else:
        loss = losses.sum()
        loss = loss if reduction == "sum" else loss / (flat != ignore_index).sum()
    return loss.to(logits.dtype)


@final
class CausalLoss:
    """The `loss_function` of a transformers model whose head is cut. Labels are shifted as in `plain`."""

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        """plain: the model's own, for logits with all columns."""
        self._plain = plain
        self.__name__ = plain.__name__  # by which other code knows the kind of loss

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        vocabulary = _vocabulary_of(logits)
        if vocabulary is None:
            return self._plain(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **others,
            )
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        targets = shift_labels.reshape(-1).to(logits.device)
        total = vocabulary.losses(flat, targets, ignore_index, 0.0).sum()
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


@final
class LossOfModel:
    """Tells the head of `model` which forwards compute a loss, and computes it for transformers models."""

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, head: nn.Module) -> None:
        """
        Raises:
            UsageError: the model has a loss that cannot be computed from own columns.
        """
        self._vocabulary = vocabulary
        self._owners: list[Any] = []
        self._names = list(inspect.signature(model.forward).parameters)
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)
        module: Any
        for module in model.modules():
            if hasattr(type(module), "loss_function") and _head_of(module) is head:
                plain = module.loss_function
                if getattr(plain, "__name__", "") != "ForCausalLMLoss":
                    raise UsageError(
                        f"tensor_parallel.vocab_parallel_lm_head = true: {type(module).__name__} has another "
                        "loss than that of causal language models; set it to false"
                    )
                self._owners.append((module, vars(module).get("_loss_function")))
                module.loss_function = CausalLoss(plain)

    def _look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        takes = any(name in self._names or name in kwargs for name in LABELS)
        has = any(given.get(name) is not None for name in LABELS)
        self._vocabulary.has_labels = has if takes else None

    def undo(self) -> None:
        """Give the models their own loss back."""
        self._hook.remove()
        for module, before in self._owners:
            del module._loss_function
            if before is not None:
                module.loss_function = before
        self._owners = []


def _head_of(module: Any) -> nn.Module | None:
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


__all__ = [
    "CausalLoss",
    "LossOfModel",
    "Vocabulary",
    "check_uses_of_logits",
    "cross_entropy",
    "own_rows",
]
