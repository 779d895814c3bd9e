"""Lets MLPs and the loss of a model compute one tile of the tokens at a time, as the config says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tensor.config import LongSequences
from ...tensor.tiles.loss import tiled_loss
from ...tensor.tiles.modules import tile_forward
from ...tensor.tiles.ranges import tiles_for
from ...utils.errors import UsageError
from ..config.config import Config
from ..model.arguments import BlockRuns
from ..model.forwards import Forward, replace_forwards
from .division import LocalModel

if TYPE_CHECKING:
    from ...tensor.slicing import Sliced
    from ...tensor.vocabulary import Vocabulary

MLPS = ("mlp", "feed_forward", "ffn")
LOSS_TOKENS = 1024  # of a tile, where the config says true
CAUSAL = "ForCausalLMLoss"  # the name of transformers' loss


def tile_layers(divided: LocalModel, section: LongSequences) -> Callable[[], None]:
    """Put tiled forwards in the place of the model's own; the returned function restores them.

    Raises:
        UsageError: a block has no MLP of a known name, or the model has another loss.
    """
    undo: list[Callable[[], Any]] = []
    model, runs, sliced = divided.model, divided.runs, divided.sliced
    is_stage = divided.found is not None  # which may have no block
    if section.tiled_mlp is not False:
        length = None if section.tiled_mlp is True else int(section.tiled_mlp)
        _refuse_no_blocks(model, runs, is_stage=is_stage)
        for module in _mlps(runs, section.tiled_modules):
            tile_forward(module, length)
            undo.append(functools.partial(module.__dict__.pop, "forward"))
    if section.tiled_loss is not False:
        tokens = LOSS_TOKENS if section.tiled_loss is True else int(section.tiled_loss)
        undo.append(_tile_loss(model, tokens, sliced))

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def _refuse_no_blocks(model: nn.Module, runs: BlockRuns, *, is_stage: bool) -> None:
    if not is_stage and not any(runs):
        raise UsageError(
            f"sequence.tiled_mlp: {type(model).__name__} has no list of blocks whose MLPs could run in "
            "tiles; call xds.tensor.tile_forward for them, and remove the setting"
        )


def _mlps(runs: BlockRuns, given: Sequence[str] | None) -> list[nn.Module]:
    found = []
    for name, block in (block for run in runs for block in run):
        inner = dict(block.named_modules())
        names = [one for one in given or MLPS if one in inner]
        if not names:
            raise UsageError(
                f"sequence.tiled_mlp: {name} ({type(block).__name__}) has no module called "
                f"{' or '.join(given or MLPS)}; write the names of its MLPs in sequence.tiled_modules, such as "
                '["mlp"]'
            )
        found += [inner[one] for one in names]
    return found


def _tile_loss(model: nn.Module, tokens: int, sliced: Sliced | None) -> Callable[[], None]:
    model = _with_own_loss(model)
    head = _head(model)
    if head is None:
        return lambda: None
    columns = None if sliced is None else sliced.columns.get(id(head))
    if (
        columns is None
        and sliced is not None
        and any(id(p) in sliced.slices for p in head.parameters())
    ):
        raise UsageError(
            "sequence.tiled_loss: tensor ranks have cut the head by rows; set tiled_loss to false, or cut it "
            "by columns with tensor_parallel.plan"
        )
    loss = TiledLoss(head, tokens, columns)
    own: Any = model.__dict__.get("_loss_function")
    undo_forward = replace_forwards([model], loss.around)
    undo_head = replace_forwards([head], loss.instead_of_head)
    plain = model.loss_function
    tiled: Any = functools.partial(loss, plain)
    tiled.__name__ = CAUSAL  # by which other code knows the kind of loss
    model.loss_function = tiled

    def undo() -> None:
        undo_head()
        undo_forward()
        if own is None:
            model.__dict__.pop("_loss_function", None)
        else:
            model.loss_function = own

    return undo


def _with_own_loss(model: nn.Module) -> nn.Module:
    """The module that computes the loss: of a wrapper, such as peft's, the model in it.

    The wrapper shows the `loss_function` of that model. One that is set on the wrapper has no effect.
    """
    if hasattr(type(model), "loss_function") or not hasattr(model, "loss_function"):
        return model
    return next((m for m in model.modules() if hasattr(type(m), "loss_function")), model)


def _head(model: nn.Module) -> nn.Linear | None:
    """The head that gives the logits; None: another pipeline stage has it.

    Raises:
        UsageError: the model is no causal language model of transformers with a plain head.
    """
    kind = getattr(getattr(model, "loss_function", None), "__name__", None)
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if kind != CAUSAL:
        raise UsageError(
            f"sequence.tiled_loss: {type(model).__name__} is no causal language model of transformers; call "
            "xds.tensor.tiled_loss in its forward, and remove the setting"
        )
    if not isinstance(head, nn.Linear):
        if head is not None and not list(head.parameters()):
            return None
        raise UsageError(
            f"sequence.tiled_loss: the head of {type(model).__name__} is no nn.Linear; set it to false"
        )
    return head


@final
class TiledLoss:
    """The loss of one model. In a training forward the head passes its input on, and the loss multiplies.

    Logits would be computed whole between the two, so `logits` of the output is None in training.
    """

    def __init__(self, head: nn.Linear, tokens: int, columns: Vocabulary | None) -> None:
        """columns: of the logits on each tensor rank; None: this rank has all."""
        self._head, self._tokens, self._columns = head, tokens, columns
        self._is_used = False  # inside a forward that computes a loss
        self._hidden: Tensor | None = None
        self._is_proven = False

    def around(self, forward: Forward) -> Forward:
        """The model's forward."""

        @functools.wraps(forward)
        def training(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.get("labels", kwargs.get("shift_labels"))
            self._is_used = model.training and torch.is_grad_enabled() and labels is not None
            try:
                output = forward(model, *args, **kwargs)
            finally:
                was_used, self._is_used, self._hidden = self._is_used, False, None
            if was_used and isinstance(output, Mapping) and "logits" in output:
                output["logits"] = None  # type: ignore[index]
            return output

        return training

    def instead_of_head(self, forward: Forward) -> Forward:
        """The head's forward: while a loss is to be computed, its input."""

        @functools.wraps(forward)
        def head(module: nn.Module, x: Tensor) -> Any:
            if not self._is_used:
                return forward(module, x)
            self._hidden = x
            return x

        return head

    def __call__(self, plain: Any, logits: Tensor, labels: Tensor, *args: Any, **more: Any) -> Any:
        """What transformers' loss for causal language models returns; `logits` are the head's input."""
        if self._hidden is None:
            return plain(logits, labels, *args, **more)
        self._check(logits, self._hidden)
        ignore: int = more.get("ignore_index", -100)
        shifted: Tensor | None = more.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:]
        count = more.get("num_items_in_batch")
        head = self._head
        loss = tiled_loss(
            self._hidden,
            head.weight,
            shifted.to(self._hidden.device),
            tiles=tiles_for(shifted.numel(), self._tokens),
            bias=head.bias,
            ignore_index=ignore,
            reduction="mean" if count is None else "sum",
            columns=self._columns,
        )
        return loss if count is None else loss / torch.as_tensor(count, device=loss.device)

    def _check(self, logits: Tensor, hidden: Tensor) -> None:
        """In the first forward: the model does nothing to its logits between head and loss."""
        if logits is hidden or self._is_proven:
            return
        _check_unchanged(hidden, logits)
        self._is_proven = True


def _check_unchanged(passed: Tensor, received: Tensor) -> None:
    """passed: by the head. received: by the loss."""
    if passed.shape != received.shape or not torch.equal(received, passed.to(received.dtype)):
        raise UsageError(
            "sequence.tiled_loss: this model changes its logits between head and loss (it scales or limits "
            "them), so the loss cannot be computed from the head's input; set tiled_loss to false"
        )


def check_tiles(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: Config) -> None:
    """Before the model is divided: later the last pipeline stage alone sees the logits.

    blocks: of the whole model. Those of experts are known when it is divided.

    Raises:
        UsageError: a block has no MLP of a known name, or the model has another loss, or changes its logits.
    """
    section = config.sequence
    if section.tiled_mlp is not False and not config.expert_parallel.enabled:
        _refuse_no_blocks(model, [blocks], is_stage=config.pipeline.stages > 1)
        _mlps([blocks], section.tiled_modules)
    if section.tiled_loss is not False:
        _check_logits(model)


def _check_logits(model: nn.Module) -> None:
    """A forward on the meta device, with a head that gives logits of the host. Where it does not run, the first
    forward of training shows the same.

    Raises:
        UsageError: the model changes its logits between head and loss.
    """
    from ...pipe.cut.meta_copies import meta_copy

    outline: Any = meta_copy(_with_own_loss(model))
    head: Any = _head(outline)
    if head is None:
        return
    logits = torch.linspace(-99, 99, 2 * head.out_features, dtype=head.weight.dtype)
    logits, received = logits.view(1, 2, -1), []
    head.forward = lambda *_: logits
    outline.loss_function = lambda logits, *_, **__: received.append(logits)
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        outline(input_ids=ids, labels=ids)  # with its cache: else masks read the ids
    for one in received:
        _check_unchanged(logits, one)


__all__ = ["check_tiles", "tile_layers"]
