"""Models as a list of layers, for pipelines, with DeepSpeed's arguments.

A layer is a module, a function, a `LayerSpec` or a `TiedLayerSpec`. Its output is the input of the next
layer; a tuple is passed as one argument. Parameters have DeepSpeed's names: "<index>.<name>" of a layer, and
"tied_modules.<key>.<name>" of tied layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..ops.torch_internals import tree_flatten, tree_unflatten
from ..utils.arguments import items, whole
from ..utils.errors import UsageError
from ..utils.module_buffers import Buffers
from .cut.costs import size_of
from .cut.meta_copies import meta_copy
from .layer_specs import LayerSpec, TiedLayerSpec, check_ties, parameter_of, share_weights
from .partition import LayerSize, partition_layers

_recompute = partial(checkpoint, use_reentrant=False)


class PipelineModule(nn.Module):
    """A model as a list of layers that a pipeline cuts into stages.

    With `num_stages` and a distributed environment, the constructor builds this rank's layers, so that
    `net.parameters()` works before `initialize`. Otherwise the cut builds them, or the first use.

    Args:
        layers: modules, functions, LayerSpec or TiedLayerSpec objects, in order.
        num_stages: the number of pipeline ranks; None: that of the config.
        topology: an object with `get_dim("pipe")` and `get_coord(rank)`; replaces `num_stages`.
        loss_fn: called as loss_fn(outputs, labels) on the last stage; None: the output is the loss. It returns
            the loss, or (loss, n): a mean and its number of items, as in `Engine.backward(loss, weight=n)`.
        seed_layers: seed the random state with base_seed + index before each layer is built and run, so that
            values do not depend on the cut.
        seed_fn: called with the seed instead of torch.manual_seed.
        partition_method: "uniform", "parameters", "best" or "type:REGEX".
        activation_checkpoint_interval: so many layers are recomputed together in backward; 0: none.
        activation_checkpoint_func: called as func(function, *inputs).
        checkpointable_layers: class names; others are not recomputed. None: all that have parameters.
        dynamic_shape: shapes differ between micro-batches; read by the executor.
    """

    schedule: str | None = None  # the schedule that the class needs; None: any

    def __init__(  # noqa: PLR0913 (the arguments are DeepSpeed's)
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = _recompute,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        listed = items("layers", layers, "a list of modules, functions and LayerSpec objects")
        self.layers = tuple(listed)  # a tuple: torch does not register its modules
        _check_layers(self.layers)
        self._names = tuple(self._find_name(index) for index in range(len(self.layers)))
        if topology is not None:
            num_stages = topology.get_dim("pipe")
        self.num_stages = None if num_stages is None else whole("num_stages", num_stages, 1)
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.base_seed = base_seed
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        if checkpointable_layers is not None:
            need = "a list of names of classes"
            checkpointable_layers = items("checkpointable_layers", checkpointable_layers, need)
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self.bounds: tuple[int, ...] | None = None  # of the stages, once the constructor has built
        self.built: frozenset[int] = frozenset()
        self._seed = seed_fn or torch.manual_seed
        self._topology = topology
        self._outline: tuple[nn.Module, ...] = ()  # a tuple: torch does not register it
        self._recomputed: dict[tuple[int, int], Buffers] = {}  # by range of layers
        self._runs: dict[int, int] = {}  # first layer of a stage -> number of its forwards
        if self.num_stages == 1:
            self.build(range(len(self.layers)))
            self._note_place(0, (0, len(self.layers)), (0,))
        elif self.num_stages is not None:
            self._build_own_stages(self.num_stages)

    def topology(self) -> Any:
        """The object that was given as `topology`; None without one."""
        return self._topology

    # -- building ---------------------------------------------------------------------------------------

    def build(self, indices: Iterable[int]) -> None:
        """Build and register the layers `indices`; modules among the other layers are given up."""
        wanted = sorted(set(indices))
        for index in wanted:
            if index not in self.built:
                self._register(self, index, self._make)
        self.built = self.built.union(wanted)

    def keep(self, indices: Sequence[int]) -> None:
        """Build the layers `indices` and give up the others: they belong to other ranks."""
        self.outline()  # while all layers are there
        if self.bounds is None:
            self.layers = tuple(
                layer if index in indices or not isinstance(layer, nn.Module) else None
                for index, layer in enumerate(self.layers)
            )
            kept = {self._names[index] for index in indices}
            for index in self.built.difference(indices):
                if self._names[index] is not None and self._names[index] not in kept:
                    self._remove(str(self._names[index]))
            self.built = self.built.intersection(indices)
        self.build(indices)

    def _remove(self, name: str) -> None:
        parent, _, child = name.rpartition(".")
        self.get_submodule(parent)._modules.pop(child, None)

    def outline(self) -> nn.Module:
        """All layers on the meta device, under the names that they have in the whole model."""
        if not self._outline:
            self._outline = (self._make_outline(),)
        return self._outline[0]

    def _make_outline(self) -> nn.Module:
        whole = nn.Module()
        memo: dict[int, Any] = {}

        def make(index: int, layer: Any) -> nn.Module:
            if isinstance(layer, LayerSpec):
                return layer.build_on_meta()
            return meta_copy(layer, memo)

        for index in range(len(self.layers)):
            self._register(whole, index, make)
        return whole

    def name_of(self, index: int) -> str | None:
        """The name of the layer's module in the whole model; None for a function."""
        return self._names[index]

    def _find_name(self, index: int) -> str | None:
        layer = self.layers[index]
        if (
            isinstance(layer, TiedLayerSpec)
            and layer.typename is self._first_of(layer.key).typename
        ):
            return f"tied_modules.{layer.key}"
        return str(index) if isinstance(layer, LayerSpec | nn.Module) else None

    def layer_sizes(self) -> list[LayerSize]:
        """The size of every layer; a tied module counts at each of its layers."""
        outline, sizes = self.outline(), []
        for index, layer in enumerate(self.layers):
            name = self.name_of(index)
            sizes.append(size_of(layer if name is None else outline.get_submodule(name)))
        return sizes

    def _first_of(self, key: str) -> TiedLayerSpec:
        return next(s for s in self.layers if isinstance(s, TiedLayerSpec) and s.key == key)

    def _register(self, root: nn.Module, index: int, make: Callable[[int, Any], nn.Module]) -> None:
        """Add the module of layer `index` to `root` under its name, tied to what is there."""
        layer = self.layers[index]
        name = self.name_of(index)
        if name is None:
            return
        if not isinstance(layer, TiedLayerSpec):
            root.add_module(name, make(index, layer))
            return
        if "tied_modules" not in root._modules:
            root.add_module("tied_modules", nn.ModuleDict())
        tied = root.get_submodule("tied_modules")
        assert isinstance(tied, nn.ModuleDict)
        if name != str(index):
            if layer.key not in tied:
                tied[layer.key] = make(index, layer)
                for attr in layer.tied_weight_attr:
                    parameter_of(tied[layer.key], attr, layer)
            return
        module = make(index, layer)
        if layer.key in tied:
            share_weights(module, tied[layer.key], layer)
        root.add_module(name, module)

    def _make(self, index: int, layer: Any) -> nn.Module:
        if isinstance(layer, nn.Module):
            return layer
        if self.seed_layers:
            # tied: the first one's
            self._seed(self.base_seed + self._names.index(self._names[index]))
        built: nn.Module = layer.build()
        return built

    def _build_own_stages(self, num_ranks: int) -> None:
        place = _rank_and_world()
        if place is None or place[1] % num_ranks:
            return
        rank, world_size = place
        pipe_rank = rank // (world_size // num_ranks)
        if self._topology is not None:
            pipe_rank = self._topology.get_coord(rank).pipe
        stages = self.stages_of(pipe_rank)
        num_stages = num_ranks * len(stages)
        sizes = self.layer_sizes()
        bounds = partition_layers(self.partition_method, sizes, num_stages)
        own_layers = [i for s in stages for i in range(bounds[s], bounds[s + 1])]
        self.keep(own_layers)
        self.bounds = bounds
        self._note_place(pipe_rank, bounds, stages)

    def _note_place(self, pipe_rank: int, bounds: Sequence[int], stages: Sequence[int]) -> None:
        """Set DeepSpeed's attributes for scripts that read them before `initialize`."""
        self.stage_id = pipe_rank
        self.parts = list(bounds)
        self._local_start, self._local_stop = bounds[stages[0]], bounds[stages[-1] + 1]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages that the constructor builds on pipeline rank `rank`."""
        return (rank,)

    def existing(self) -> list[nn.Module]:
        """The modules that have memory: those that were given, and those that are built."""
        given = [layer for layer in self.layers if isinstance(layer, nn.Module)]
        return [*given, *(module for module in self._modules.values() if module is not None)]

    # -- running ----------------------------------------------------------------------------------------

    def forward(self, forward_input: Any) -> Any:
        """Run all layers one after another.

        Raises:
            UsageError: this rank has only a part of the layers.
        """
        self._build_all()
        if len(self.built) < len(self.layers):
            raise UsageError(
                "PipelineModule.forward: this rank has only its own stage's layers; call engine.train_batch() "
                "or engine.eval_batch()"
            )
        return self.run_layers(0, len(self.layers), forward_input)

    def run_layers(self, start: int, stop: int, value: Any) -> Any:
        """Run the layers `start` to `stop` - 1, which must be built."""
        run = self._runs[start] = self._runs.get(start, 0) + 1
        interval = self.activation_checkpoint_interval
        if not interval:
            return self._run_range(start, stop, run, value)
        for first in range(start, stop, interval):
            end = min(first + interval, stop)
            if torch.is_grad_enabled() and self._is_recomputed(first, end):
                # tensors as arguments; new containers for each run, as a layer may change what it gets
                leaves, structure = tree_flatten(value)
                function = partial(self._run_leaves, (first, end, run), structure)
                once = self._buffers_of(first, end).once(function)
                value = self.activation_checkpoint_func(once, *leaves)
            else:
                value = self._run_range(first, end, run, value)
        return value

    def _run_leaves(self, layers: tuple[int, int, int], structure: Any, *leaves: Any) -> Any:
        return self._run_range(*layers, tree_unflatten(list(leaves), structure))

    def _run_range(self, start: int, stop: int, run: int, value: Any) -> Any:
        for index in range(start, stop):
            if self.seed_layers:
                self._seed(self.base_seed * run + index)
            value = self._run_layer(index, value)
        return value

    def _run_layer(self, index: int, value: Any) -> Any:
        name, layer = self.name_of(index), self.layers[index]
        if name is None:
            return layer(value)
        module = self._modules.get(name) or self.get_submodule(name)
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            return layer.forward_fn(module, value)
        return module(value)

    def _buffers_of(self, start: int, stop: int) -> Buffers:
        if (start, stop) not in self._recomputed:
            modules = self._modules_of(start, stop)
            self._recomputed[start, stop] = Buffers(m for top in modules for m in top.modules())
        return self._recomputed[start, stop]

    def _modules_of(self, start: int, stop: int) -> list[nn.Module]:
        names = [self.name_of(index) for index in range(start, stop)]
        return [self.get_submodule(name) for name in names if name is not None]

    def _is_recomputed(self, start: int, stop: int) -> bool:
        modules = self._modules_of(start, stop)
        if self.checkpointable_layers is not None:
            kinds = {type(module).__name__ for module in modules}
            return len(modules) == stop - start and kinds <= set(self.checkpointable_layers)
        return any(True for module in modules for _ in module.parameters())

    # -- an unbuilt module is built by its first use ------------------------------------------------------

    def _build_all(self) -> None:
        if not self.built:
            self.build(range(len(self.layers)))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._build_all()
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return modules

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        self._build_all()
        return super().named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build_all()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build_all()
        return super().load_state_dict(*args, **kwargs)


class DualPipeVModule(PipelineModule):
    """A list of layers for the schedule "dualpipev": rank r has the stages r and 2 * num_stages - 1 - r."""

    schedule = "dualpipev"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        assert self.num_stages is not None
        return (rank, 2 * self.num_stages - 1 - rank)


def _check_layers(layers: Sequence[Any]) -> None:
    for index, layer in enumerate(layers):
        if not (isinstance(layer, LayerSpec) or callable(layer)):
            raise UsageError(
                f"PipelineModule: layer {index} is a {type(layer).__name__}; a layer must be a module, a "
                "function, a LayerSpec or a TiedLayerSpec"
            )
        if isinstance(layer, PipelineModule):
            raise UsageError(
                f"PipelineModule: layer {index} is a PipelineModule; pass its layers one by one instead"
            )
    if not layers:
        raise UsageError("PipelineModule: layers is empty; it needs at least one layer")
    check_ties(layers)


def _rank_and_world() -> tuple[int, int] | None:
    """This process's rank and the number of all; None without a distributed environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and world_size.isdigit():
        return int(rank), int(world_size)
    return None


__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec"]
