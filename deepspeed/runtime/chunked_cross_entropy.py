"""`deepspeed.runtime.chunked_cross_entropy`: the loss of a language model, a block of rows at a time.

Neither forward nor backward has an fp32 tensor of [rows, vocabulary]: forward keeps one number per row, the
logarithm of the sum of exponentials, and backward computes the softmax of each block again from the logits.
"""

from __future__ import annotations

import operator
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from ..missing import placeholder

BACKENDS = ("auto", "torch", "triton")
_BLOCK_ELEMENTS = 2**26  # 256 MiB in fp32


def triton_backend_available() -> bool:
    """False: torch's operations compute it on every device."""
    return False


@final
class _RowLosses(Function):
    """The loss of each row, [rows] fp32; 0 where the target is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int, block: int) -> Tensor:
        counts = target != ignored
        index = target.where(counts, 0)[:, None]
        blocks = zip(torch.split(logits, block), torch.split(index, block), strict=True)
        found = [_of_block(rows.float(), chosen) for rows, chosen in blocks]
        sums = torch.cat([one[0] for one in found]) if found else logits.new_empty(0).float()
        picked = torch.cat([one[1] for one in found]) if found else sums
        ctx.save_for_backward(logits, index, counts, sums)
        ctx.block = block
        return (sums - picked).where(counts, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy has no second derivative: leave out create_graph=True"
            )
        logits, index, counts, sums = ctx.saved_tensors
        factors = grad.float().where(counts, 0.0)[:, None]
        result = torch.empty_like(logits)
        parts = [
            torch.split(one, ctx.block) for one in (result, logits, index, factors, sums[:, None])
        ]
        for into, rows, chosen, factor, total in zip(*parts, strict=True):
            slope = rows.float().sub_(total).exp_()
            slope.scatter_add_(1, chosen, slope.new_full(chosen.shape, -1.0))
            into.copy_(slope.mul_(factor))
        return result, None, None, None


def _of_block(rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(logarithms of the sums of exponentials, logits of the targets)."""
    return rows.logsumexp(1), rows.gather(1, chosen)[:, 0]


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    block_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """`torch.nn.functional.cross_entropy(logits.float(), target)`, in fp32.

    Args:
        logits: [rows, vocabulary], any floating dtype; its gradient has that dtype.
        target: [rows] int64.
        reduction: "mean" over rows that are not ignored (nan where there are none), "sum" or "none".
        block_rows: rows of a block; None: blocks of 256 MiB.
        backend: "auto" or "torch".
    Raises:
        ValueError, TypeError: an argument that does not fit.
        RuntimeError: the dtype or a value of `target` is wrong, or backend="triton", which there is not.
    """
    block = _checked_block(block_rows) or max(1, _BLOCK_ELEMENTS // max(1, logits.shape[-1]))
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        shapes = f"{tuple(logits.shape)} and {tuple(target.shape)}"
        raise ValueError(
            f"chunked_cross_entropy needs logits [rows, vocabulary] and targets [rows], got {shapes}"
        )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction = {reduction!r}: must be none, sum or mean")
    if target.dtype != torch.long:
        raise RuntimeError(f"targets of {target.dtype}: class numbers are int64; cast them")
    _check_backend(backend)
    if backend == "triton":
        raise RuntimeError(
            'backend="triton" needs CUDA logits and Triton kernels, which xds has not; use "torch"'
        )
    target = target.to(logits.device)
    counts = target != ignore_index
    size = logits.shape[-1]
    is_inside = ~(counts & ((target < 0) | (target >= size))).any()
    _assert_async(is_inside, f"a target is out of range: the vocabulary has {size} entries")
    losses: Tensor = _RowLosses.apply(logits, target, ignore_index, block)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _assert_async(condition: Tensor, message: str) -> None:
    """Fail as cross_entropy does: on a GPU in the kernel, without waiting for it."""
    if condition.device.type != "cpu":
        torch._assert_async(condition, message)
    elif not condition:
        raise RuntimeError(message)


def _checked_block(block_rows: Any) -> int | None:
    if block_rows is None:
        return None
    try:
        number = operator.index(block_rows)
    except TypeError:
        raise TypeError(f"block_rows = {block_rows!r}: must be a whole number or None") from None
    if number < 1:
        raise ValueError(f"block_rows = {number}: must be at least 1, or None")
    return number


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(
            f"Unsupported chunked cross-entropy backend {backend!r}: must be {', '.join(BACKENDS)}"
        )


@final
class ChunkedCausalLMLoss:
    """`ForCausalLMLoss` of transformers, with the same shift, ignored labels and divisor."""

    def __init__(self, block_rows: int | None = None, backend: str = "auto") -> None:
        _check_backend(backend)
        self.block_rows = _checked_block(block_rows)
        self.backend = backend

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss, [] fp32.

        Args:
            logits: [..., tokens, vocab_size].
            labels: [..., tokens] int64; label i + 1 belongs to the logits of token i.
            num_items_in_batch: divide the sum by it; None: by the number of labels that count.
            shift_labels: labels that are shifted already; `labels` is then not read.
        """
        if shift_labels is None:
            if labels is None:
                raise ValueError("ChunkedCausalLMLoss needs labels or shift_labels")
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        rows, targets = logits.reshape(-1, vocab_size), shift_labels.reshape(-1)
        divides = num_items_in_batch is not None
        loss = chunked_cross_entropy(
            rows,
            targets,
            ignore_index,
            "sum" if divides else "mean",
            self.block_rows,
            self.backend,
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch if divides else loss


def install_chunked_causal_lm_loss(
    model: Any, block_rows: int | None = None, backend: str = "auto"
) -> ChunkedCausalLMLoss:
    """Let a causal language model of transformers compute its loss so.

    Raises:
        ValueError: its loss is another one than `ForCausalLMLoss`, or cannot be set.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    made = ChunkedCausalLMLoss(block_rows, backend)
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise ValueError(
            "install_chunked_causal_lm_loss replaces the stock Hugging Face ForCausalLMLoss alone, and the "
            f"model has {getattr(model, 'loss_function', None)!r}"
        )
    try:
        model.loss_function = made
    except (AttributeError, TypeError) as error:
        raise ValueError("the model's loss_function is not writable") from error
    is_set = getattr(model, "loss_function", None) is made
    if not is_set:
        raise ValueError("the model's loss_function is not writable")
    return made


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["ChunkedCausalLMLoss", "chunked_cross_entropy", "install_chunked_causal_lm_loss"]
