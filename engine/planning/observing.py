"""Runs a model once on the meta device for each kind of slice, to count its activations."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.fake import FakeGroups
from ...ops.mesh import Mesh
from ...ops.torch_internals import tree_leaves
from ...tensor.plan import ParallelPlan
from ...tensor.slicing import Sliced
from ...tensor.styles import StyleName
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ..config.batch import mesh_of
from ..config.config import Config
from ..data.batches import call_with, loss_of
from ..model.arguments import is_part, with_model
from ..model.forwards import replace_forwards
from ..model.fp32_modules import cast_borders
from ..model.precision import compute_dtype
from ..parallel.sequences import by_name, check_sequences, token_cuts
from .activations import Activations, NotRepeated, Repeated, kind_of, models_of, observe
from .models import ModelSource
from .shares import Shares, sliced_here
from .work import Call, Kernel

if TYPE_CHECKING:
    from ...experts.expected import ExpectedLayer

NOT_COUNTED = "activations are not counted"


def kernel_calls(source: ModelSource, config: Config) -> dict[Kernel, Call]:
    """The kernels of a micro-batch on one rank, and a call of torch that launches each of them.

    Raises:
        UsageError: the model does not run on the meta device, or no micro-batch of it is known.
    """
    model = source.on_meta()
    config = with_model(config, model).resolve(1)
    mesh = mesh_of(config.pipeline, config.tensor_parallel, 1, 1)
    calls: dict[Kernel, Call] = {}
    shares = Shares(source, model, config, mesh, 1)
    found = Observations(source, shares, config, mesh, calls).of([0])
    if isinstance(found, str):
        raise UsageError(f"--model {printable(source.name)}: {found}")
    return calls


@final
class Observations:
    """The runs of one model and config."""

    def __init__(
        self,
        source: ModelSource,
        shares: Shares,
        config: Config,
        mesh: Mesh,
        calls: dict[Kernel, Call] | None = None,
    ) -> None:
        """calls: gets a call of torch for each kernel, which keeps the parameters as they are sliced."""
        self._source = source
        self._shares = shares
        self._config = config
        self._mesh = mesh
        self._experts: list[ExpectedLayer] = []
        self._calls = calls

    @property
    def notes(self) -> list[str]:
        """What the messages and activations of experts depend on."""
        if self._shares.num_expert_ranks == 1:
            return []
        found = [layer.most for layer in self._experts if layer.most]
        return found[:1] or ["experts: their messages are not counted, as the model does not run"]

    def of(self, tensors: Sequence[int]) -> dict[int, Activations] | str:
        """What a micro-batch keeps and sends, by tensor coordinate; else a note why it is not known."""
        if is_part(self._shares.model):
            return f"{NOT_COUNTED}: a PipelineModule is built stage by stage"
        batch = self._source.batch_on_meta(self._config.train_micro_batch_size_per_gpu)
        if batch is None:
            return f"{NOT_COUNTED}: no micro-batch is known; let the function return (model, batch)"
        try:
            found = {tensor: self._run(batch, tensor) for tensor in tensors}
            for seen in found.values():
                seen.tokens = self._tokens(batch)
            return found
        except UsageError:
            raise
        except Exception as error:
            text = str(error).strip().split("\n")[0][:150]
            kind = type(error).__name__
            return f"{NOT_COUNTED}: the model does not run on the meta device ({kind}: {text})"

    def _tokens(self, batch: Any) -> int:
        """Of the micro-batch; samples, where inputs are no rows of whole numbers."""
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
                return leaf.numel()
        return self._config.train_micro_batch_size_per_gpu

    def _run(self, batch: Any, tensor: int) -> Activations:
        if not self._shares.depends_on_names:
            kinds = (self._shares.kind_of(*block) for block in self._shares.blocks)
            with suppress(NotRepeated):
                return self._run_blocks(batch, tensor, models_of(kinds))
        return self._run_blocks(batch, tensor, None)

    def _run_blocks(self, batch: Any, tensor: int, like: Mapping[int, int] | None) -> Activations:
        """like: blocks that stay whole and do not run, see `models_of`; None: all are sliced."""
        model, shares = self._shares.model, self._shares
        groups = FakeGroups(self._mesh, shares.ranks_per_host, tensor=tensor)
        blocks = [module for _, module in shares.blocks]
        dtype, fp32 = compute_dtype(self._config), shares.fp32
        idle = {id(p) for number in like or () for p in blocks[number].parameters()}
        gc.collect()  # a graph of another rank's slices knows parameters by the shapes that they had
        ways = self._ways(like or {})
        with sliced_here(model, [shares.blocks], None, ways, self._config, groups) as cut:
            for param in model.parameters() if dtype else []:
                if param.is_floating_point() and id(param) not in idle:
                    param.data = param.data.to(torch.float32 if id(param) in fp32.params else dtype)
            self._convert(model, self._expect_tokens(groups, cut))
            if dtype and fp32.borders:
                cast_borders(fp32.borders, dtype)  # `sliced_here` ends it
            repeated = Repeated(blocks, like or models_of(map(kind_of, blocks)), can_run=not like)
            with _own_tokens(model, batch, self._config, groups) as own:
                call = partial(_loss, model, own)
                compiles = self._config.compile.enabled or self._source.fuses
                seen = self._calls
                return observe(
                    model, blocks, groups, call, seen, repeated=repeated, compiles=compiles
                )

    def _ways(self, idle: Collection[int]) -> ParallelPlan | None:
        """How layers are sliced. Those of blocks that do not run stay whole; their tokens are still cut."""
        if self._shares.ways is None:
            return None
        inside = {
            f"{name}.{inner}"
            for name, block in (self._shares.blocks[number] for number in idle)
            for inner, _ in block.named_modules()
        }
        return {
            name: way
            for name, way in self._shares.ways.items()
            if way.name is StyleName.TOKENS or name not in inside
        }

    def _convert(self, model: nn.Module, experts: Collection[int]) -> None:
        """Linear layers multiply in 8 bits where the config says so; `sliced_here` ends it.

        experts: id of their parameters.
        """
        section = self._config.float8
        if not section.enabled:
            return
        from ...compression.float8.layers import convert, linear_layers

        apart = {*self._shares.fp32.params, *experts}
        layers = linear_layers(model, section.recipe, section.filter, lambda _, name: name, apart)
        convert(model, [each.module for each in layers if not each.reason], section.recipe)

    def _expect_tokens(self, groups: FakeGroups, sliced: Sliced) -> Collection[int]:
        """Experts of one rank get as many tokens as uniform routing sends. Returns id of their parameters."""
        experts = self._shares.keep_experts(self._shares.model, groups)
        if experts is None:
            return ()
        from ...experts.block import rerouting
        from ...experts.expected import ExpectedLayer

        group = self._shares.group_of_experts(groups)
        tensor = groups.along("tensor") if self._mesh.tensor > 1 else None
        own_tokens = {
            each.name for each in experts.found if sliced.tokens and sliced.tokens.of(each.name)
        }
        self._experts = [
            ExpectedLayer(
                each,
                group,
                None if each.name in own_tokens else tensor,
                self._config.expert_parallel.chunks,
            )
            for each in experts.found
        ]
        setting = self._config.expert_parallel.setting
        for each, layer in zip(experts.found, self._experts, strict=True):
            replace_forwards([each.module], rerouting(each, layer, setting).rerouted)
        return frozenset(map(id, experts.params()))


@contextmanager
def _own_tokens(model: nn.Module, batch: Any, config: Config, groups: FakeGroups) -> Iterator[Any]:
    """The inputs of the first sequence rank, whose attention exchanges heads inside."""
    if config.sequence_parallel_size == 1:
        yield batch
        return
    check_sequences(model, config)
    cuts = token_cuts(model, groups.along("sequence"), config)
    try:
        yield cuts.cut(by_name(model, batch))
    finally:
        cuts.undo()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return loss_of(call_with(model, batch))


__all__ = ["NOT_COUNTED", "Observations", "kernel_calls"]
