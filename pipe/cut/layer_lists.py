"""Cuts a list of layers: nn.Sequential, or PipelineModule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import Tensor, nn

from ...utils.errors import UsageError
from ..module import PipelineModule
from ..partition import LayerSize, partition_layers, stage_of_layer
from .costs import size_of
from .flows import pack, unpack
from .names import names_of, names_of_part
from .part import Block, Flow, Part, StagePlacement, WeightedLoss


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


class LayerList(ABC):
    """Layers in order, each a module with a name or a function."""

    root: nn.Module

    @abstractmethod
    def outline(self) -> nn.Module:
        """The whole model, with the names and shapes of all parameters."""

    @abstractmethod
    def names(self) -> list[str | None]:
        """The name of each layer's module; None for a function."""

    @abstractmethod
    def bounds(self, partition: str | Sequence[int] | None, num_stages: int) -> tuple[int, ...]: ...

    @abstractmethod
    def keep(self, own: Sequence[int]) -> None:
        """Build the layers `own` and give up the others."""

    @abstractmethod
    def inputs(self, batch: Any) -> Any:
        """What the first layer gets."""

    @abstractmethod
    def run(self, start: int, stop: int, value: Any) -> Any:
        """Run the layers `start` to `stop` - 1."""

    @abstractmethod
    def result(self, outputs: Any, batch: Any) -> Any:
        """The loss, or what begins with it, from what the last layer returned."""


@final
class SequentialLayers(LayerList):
    """The children of an nn.Sequential. Its output is the loss, or starts with it."""

    def __init__(self, root: nn.Sequential) -> None:
        self.root = root
        self._layers = list(root.named_children())

    def outline(self) -> nn.Module:
        return self.root

    def names(self) -> list[str | None]:
        return [name for name, _ in self._layers]

    def bounds(self, partition: str | Sequence[int] | None, num_stages: int) -> tuple[int, ...]:
        sizes = [size_of(layer) for _, layer in self._layers]
        return partition_layers("best" if partition is None else partition, sizes, num_stages)

    def keep(self, own: Sequence[int]) -> None:
        for index, (name, _) in enumerate(self._layers):
            if index not in own:
                self.root._modules[name] = OtherStage(name)
        self._layers = list(self.root.named_children())

    def inputs(self, batch: Any) -> Any:
        values = list(batch.values()) if isinstance(batch, Mapping) else batch
        if not isinstance(values, tuple | list):
            return batch
        if len(values) != 1:
            raise UsageError(
                f"nn.Sequential takes one argument, the batch has {len(values)}; use PipelineModule "
                "with loss_fn for batches of (inputs, labels)"
            )
        return values[0]

    def run(self, start: int, stop: int, value: Any) -> Any:
        for _, layer in self._layers[start:stop]:
            value = layer(value)
        return value

    def result(self, outputs: Any, batch: Any) -> Any:
        return outputs


@final
class PipelineLayers(LayerList):
    """The layers of a PipelineModule."""

    def __init__(self, root: PipelineModule) -> None:
        self.root: PipelineModule = root

    def outline(self) -> nn.Module:
        return self.root.outline()

    def names(self) -> list[str | None]:
        return [self.root.name_of(index) for index in range(len(self.root.layers))]

    def bounds(self, partition: str | Sequence[int] | None, num_stages: int) -> tuple[int, ...]:
        built = self.root.bounds
        if built is not None:
            if len(built) != num_stages + 1:
                raise UsageError(
                    f"PipelineModule(num_stages={self.root.num_stages}) has built its layers for "
                    f"{len(built) - 1} stages, the config asks for {num_stages} (with chunks); leave "
                    "num_stages out, or make the two equal"
                )
            return built
        sizes: list[LayerSize] = self.root.layer_sizes()
        method = self.root.partition_method if partition is None else partition
        return partition_layers(method, sizes, num_stages)

    def keep(self, own: Sequence[int]) -> None:
        self.root.keep(own)

    def inputs(self, batch: Any) -> Any:
        return self._pair(batch)[0]

    def run(self, start: int, stop: int, value: Any) -> Any:
        return self.root.run_layers(start, stop, value)

    def result(self, outputs: Any, batch: Any) -> Any:
        if self.root.loss_fn is None:
            return outputs
        loss = self.root.loss_fn(outputs, self._pair(batch)[1])
        if isinstance(loss, tuple | list) and len(loss) == 2 and _is_scalar(loss[1]):
            return WeightedLoss(*loss)
        return loss

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        if self.root.loss_fn is None:
            return batch, None
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UsageError(
            f"the loader gave a {type(batch).__name__}{size}; a PipelineModule with loss_fn needs batches of "
            "(inputs, labels); return such pairs, or convert batches with engine.set_batch_fn"
        )


@final
class OtherStage(nn.Module):
    """Stands for a layer of another pipeline rank. It has no parameters and cannot be called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"layer {self._name} is on another pipeline rank; call engine.train_batch() or engine.eval_batch()"
        )


@final
class LayerListPart(Part):
    """This rank's layers of a list."""

    def __init__(
        self,
        layers: LayerList,
        placement: StagePlacement,
        rank: int,
        partition: str | Sequence[int] | None,
    ) -> None:
        self._layers = layers
        self._bounds = layers.bounds(partition, placement.num_stages)
        self._last_stage = placement.num_stages - 1
        stage_of = stage_of_layer(self._bounds)
        layer_names = layers.names()
        outline = layers.outline()
        whole = names_of(outline)
        holders: dict[str, set[int]] = {}
        for name, stage in zip(layer_names, stage_of, strict=True):
            if name is not None:
                for inner, _ in outline.get_submodule(name).named_parameters():
                    holders.setdefault(f"{name}.{inner}", set()).add(placement.rank_of(stage))
        stages = placement.stages_of(rank)
        own_layers = [index for index, stage in enumerate(stage_of) if stage in stages]
        layers.keep(own_layers)
        blocks = _blocks(
            layers.root, [(layer_names[index], stage_of[index]) for index in own_layers]
        )
        names = names_of_part(whole, layers.root, holders)
        super().__init__(layers.root, blocks, names)

    def run(self, stage: int, batch: Any, arrived: Flow | None, micro_batch: int) -> Any:
        value = self._layers.inputs(batch) if arrived is None else unpack(arrived)
        value = self._layers.run(self._bounds[stage], self._bounds[stage + 1], value)
        if stage == self._last_stage:
            return value
        return pack(value, f"the last layer of pipeline stage {stage}")

    def result(self, outputs: Any, batch: Any) -> Any:
        return self._layers.result(outputs, batch)

    def recomputing(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def release(self, stage: int, micro_batch: int) -> None:
        return

    def restore(self) -> None:
        return


def _blocks(root: nn.Module, layers: Sequence[tuple[str | None, int]]) -> tuple[Block, ...]:
    """The layers with parameters, each once. `layers`: name and stage of this rank's layers.

    A tied layer may be used in two stages of one rank. It is no block then: gradients of a block come from
    one stage only.
    """
    blocks: dict[nn.Module, Block] = {}
    stages: dict[nn.Module, set[int]] = {}
    for name, stage in layers:
        if name is not None:
            module = root.get_submodule(name)
            stages.setdefault(module, set()).add(stage)
            if any(True for _ in module.parameters()):
                blocks.setdefault(module, Block(name, module, stage))
    return tuple(block for module, block in blocks.items() if len(stages[module]) == 1)


__all__ = ["LayerList", "LayerListPart", "OtherStage", "PipelineLayers", "SequentialLayers"]
