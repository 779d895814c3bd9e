"""Finds a plan for a model that has none: runs one block of each kind, and sees which columns depend on which.

    input of `down`, column j    depends on column j of `up`                 so both are cut by columns
    input of `out`, head i       depends on columns of head i in q, k and v  so they are cut by heads
    input of `up`, column j      depends on all columns of `out`: a norm     so nothing is cut between them

In the run every linear layer returns random numbers. So a dependence goes from one linear layer to the next,
and not through it. What is found is a guess for other inputs: the proof in the first forward decides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..ops.torch_internals import tree_leaves, tree_map
from ..utils.module_buffers import untouched_buffers
from .heads import Heads, heads_of, ranges_of_layer, set_counts
from .plan import ParallelPlan
from .quiet_runs import without_cache
from .styles import ParallelStyle, StyleName, is_linear

SAMPLES, LENGTH = 2, 8  # of the random input
MOST_PROBES = 32  # units whose dependence is looked at

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def find_plan(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> ParallelPlan:
    """Module name -> how it is cut, for the layers of `blocks`; {}: nothing was found."""
    plan: ParallelPlan = {}
    kinds: dict[Any, ParallelPlan] = {}
    for name, block in blocks:
        kind = (type(block), tuple((n, tuple(p.shape)) for n, p in block.named_parameters()))
        if kind not in kinds:
            kinds[kind] = _plan_of_block(model, block)
        plan |= {f"{name}.{inner}": style for inner, style in kinds[kind].items()}
    return plan


def _plan_of_block(model: nn.Module, block: nn.Module) -> ParallelPlan:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with (
            torch.random.fork_rng(enabled=True),
            untouched_buffers(model.modules()),
            torch.enable_grad(),
        ):
            real = _with_values(block)
            for inputs in _inputs(model, block):
                values = tree_map(_valued, inputs)
                again = tree_map(without_cache, values)
                run = _run(real, values)
                if run is not None:
                    return _pairs(real, run, again)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return {}


def _with_values(block: nn.Module) -> nn.Module:
    """`block`, or a copy with random values where it has none: on the meta device."""
    if not any(tensor.is_meta for tensor in (*block.parameters(), *block.buffers())):
        return block
    copied = copy.deepcopy(block).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.copy_(_valued(torch.empty_like(tensor, device="meta")))
    return copied


def _valued(value: Any) -> Any:
    """Random numbers for a tensor on the meta device; ones for one of integers or flags."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    if not value.is_floating_point():
        return torch.ones(value.shape, dtype=value.dtype)
    generator = torch.Generator().manual_seed(4)
    return torch.rand(value.shape, generator=generator).to(value.dtype)


# -- one run of a block -----------------------------------------------------------------------------------


class _Reached(Exception):
    """The block was called: its inputs are known."""


class _Run(NamedTuple):
    """inputs, outputs: of each linear layer by name, in the order of the calls. ends: outputs of the block."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    ends: list[Tensor]


def _inputs(model: nn.Module, block: nn.Module) -> Iterator[Inputs]:
    """Arguments with which the block may run, the simplest first."""
    param = next(block.parameters())
    width = next((m.in_features for m in block.modules() if isinstance(m, nn.Linear)), 0)
    norm = next((m for m in block.modules() if type(m).__name__.endswith("Norm")), None)
    if norm is not None and len(list(norm.parameters(recurse=False))):
        width = next(norm.parameters(recurse=False)).numel()
    ids = torch.arange(SAMPLES * LENGTH, device=param.device).view(SAMPLES, LENGTH) % 7 + 1
    calls: tuple[Callable[[], Any], ...] = (
        lambda: model(input_ids=ids),
        lambda: model(ids),
        lambda: model(input_ids=ids, decoder_input_ids=ids),
    )
    for call in calls:
        arguments = _arguments(block, call)
        if arguments is not None:
            yield arguments
    generator = torch.Generator().manual_seed(1)
    for shape in ((SAMPLES, LENGTH, width), (SAMPLES * LENGTH, width)):
        yield (torch.randn(shape, generator=generator).to(param),), {}


def _arguments(block: nn.Module, call: Callable[[], Any]) -> Inputs | None:
    calls: list[Inputs] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Reached

    hook = block.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            call()
    except Exception:  # a model of another kind of input
        pass
    finally:
        hook.remove()
    return calls[0] if calls else None


def _run(block: nn.Module, inputs: Inputs) -> _Run | None:
    """Run the block with random outputs of linear layers; None: it cannot run with these inputs."""
    args, kwargs = inputs
    run = _Run({}, {}, [])
    with _watched(block, run):
        try:
            result = block.forward(*args, **kwargs)
            run.ends.extend(_tensors(result))
            _sources([*run.ends, *run.inputs.values()], run.outputs)
        except Exception:  # the block needs other inputs, or writes to what its backward needs
            return None
    return run


@contextmanager
def _watched(block: nn.Module, run: _Run) -> Iterator[None]:
    generator = torch.Generator().manual_seed(2)

    def watch(name: str) -> Callable[..., Tensor]:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            run.inputs[name] = args[0]
            run.outputs[name] = torch.randn(out.shape, generator=generator).to(out)
            return run.outputs[name].requires_grad_().clone()  # a block may write to it

        return hook

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in block.named_modules()
        if is_linear(module)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# -- what depends on what ---------------------------------------------------------------------------------


def _pairs(block: nn.Module, run: _Run, inputs: Inputs) -> ParallelPlan:
    """The layers between which activations can be cut. inputs: for another run of the block."""
    plan: ParallelPlan = {}
    in_end = _sources(run.ends, run.outputs)
    users = {name: _sources([given], run.outputs) for name, given in run.inputs.items()}
    for name, sources in users.items():
        others = {source for other, used in users.items() if other != name for source in used}
        if not sources or sources & (in_end | others | set(plan)):
            continue  # nothing before it, or something whole depends on it as well
        probe = _Probe(
            run.inputs[name], {source: run.outputs[source] for source in sorted(sources)}
        )
        styles = probe.styles(name)
        if styles and _runs_cut(block, name, styles, run, inputs):
            plan |= styles
            plan |= _between(block, run.inputs[name])
    return plan


def _runs_cut(block: nn.Module, name: str, styles: ParallelPlan, run: _Run, inputs: Inputs) -> bool:
    """Whether the block runs with the first of two slices of the layers in `styles`, as a rank runs it.

    It does not where numbers of heads, parameters or inputs of all heads stay whole on each rank.
    name: the layer that is cut by rows. inputs: of the block.
    """
    modules = dict(block.named_modules())
    columns: dict[str, list[int]] = {}
    counts: list[tuple[nn.Module, Heads]] = []
    for parent in {layer.rpartition(".")[0] for layer in styles}:
        layers = {n: (modules[n], s) for n, s in styles.items() if n.rpartition(".")[0] == parent}
        heads = heads_of(modules[parent], layers)
        if heads is not None:
            counts.append((modules[parent], heads))
        for layer, (module, style) in layers.items():
            first, *_ = ranges_of_layer(layer, module, style, heads, 2)
            columns[layer] = [column for bounds in first for column in range(*bounds)]
    outputs = {layer: out.detach() for layer, out in run.outputs.items()}
    outputs |= {layer: outputs[layer][..., columns[layer]] for layer in styles if layer != name}
    share: list[Tensor] = []

    def whole_input(_: nn.Module, args: tuple[Any, ...]) -> Tensor:
        share.append(args[0])
        return run.inputs[name].detach()

    hooks = [modules[name].register_forward_pre_hook(whole_input)]
    for layer, out in outputs.items():
        hooks.append(modules[layer].register_forward_hook(lambda *_, out=out: out.clone()))
    attributes = [(parent.__dict__, dict(parent.__dict__)) for parent, _ in counts]
    try:
        for module, own_heads in counts:
            set_counts(module, own_heads, 2, 0)
        with torch.no_grad():
            ends = _tensors(block.forward(*inputs[0], **inputs[1]))
    except Exception:  # shapes do not fit
        return False
    finally:
        for hook in hooks:
            hook.remove()
        for current, before in attributes:
            current.update(before)
    wanted = [run.inputs[name][..., columns[name]], *run.ends]
    return len(share) == 1 and _are_close([*share, *ends], wanted)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def _sources(tensors: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> set[str]:
    """The linear layers on whose outputs `tensors` depend."""
    used = [tensor for tensor in tensors if tensor.requires_grad]
    if not (used and outputs):
        return set()
    total = torch.stack([tensor.float().sum() for tensor in used]).sum()
    grads = torch.autograd.grad(total, list(outputs.values()), retain_graph=True, allow_unused=True)
    return {name for name, grad in zip(outputs, grads, strict=True) if grad is not None}


def _between(block: nn.Module, given: Tensor) -> ParallelPlan:
    """Modules with parameters between two layers, such as norms of heads: each rank has a part of the sum."""
    params = {id(param): param for param in block.parameters() if param.requires_grad}
    if not params:
        return {}
    grads = torch.autograd.grad(
        given.float().sum(), list(params.values()), retain_graph=True, allow_unused=True
    )
    used = {key for key, grad in zip(params, grads, strict=True) if grad is not None}
    return {
        name: ParallelStyle(StyleName.PARTIAL)
        for name, module in block.named_modules()
        if name and any(id(param) in used for param in module.parameters(recurse=False))
    }


@final
class _Probe:
    """Looks at which columns of the outputs `sources` the columns of `given` depend on."""

    def __init__(self, given: Tensor, sources: Mapping[str, Tensor]) -> None:
        self._given = given
        self._sources = sources
        self._width = given.shape[-1]
        seeds = torch.Generator().manual_seed(3)
        self._seed = (torch.rand(given.shape, generator=seeds) + 0.5).to(given)

    def styles(self, name: str) -> ParallelPlan:
        """The layer `name`, whose input is `given`, by rows, and the sources by columns; {}: not separable."""
        size = self._unit_size()
        units = self._width // size
        if units < 2:
            return {}
        runs = {source: _runs(columns) for source, columns in self._columns(0, size).items()}
        parts = {
            source: tuple(units * length for _, length in runs_of_source)
            for source, runs_of_source in runs.items()
        }
        step = max(1, units // MOST_PROBES)
        for unit in {*range(0, units, step), units - 1}:
            for source, columns in self._columns(unit * size, size).items():
                if columns != _expected(parts[source], units, unit):
                    return {}
        for source, sizes in parts.items():
            if sum(sizes) != self._sources[source].shape[-1]:
                return {}
        is_column = size == 1 and all(
            length == 1 for runs_of_source in runs.values() for _, length in runs_of_source
        )
        kept = 0 if is_column else units
        styles = {name: ParallelStyle(StyleName.ROWWISE, (self._width,), kept)}
        for source, sizes in parts.items():
            style_name = StyleName.COLWISE if len(sizes) == 1 else StyleName.PACKED_COLWISE
            styles[source] = ParallelStyle(style_name, sizes, kept)
        return styles

    def _unit_size(self) -> int:
        """The fewest columns after which the dependence is on other columns of every source."""
        first = self._columns(0, 1)
        for size in range(1, self._width):
            if self._width % size == 0 and _are_disjoint(first, self._columns(size, 1)):
                return size
        return self._width

    def _columns(self, start: int, count: int) -> dict[str, set[int]]:
        """The columns of each source on which `count` columns of the input depend."""
        part = (self._given * self._seed).narrow(-1, start, count).float().sum()
        tensors = list(self._sources.values())
        grads = torch.autograd.grad(part, tensors, retain_graph=True, allow_unused=True)
        columns = {}
        for name, grad in zip(self._sources, grads, strict=True):
            used = [] if grad is None else grad.flatten(0, -2).ne(0).any(0).nonzero()[:, 0].tolist()
            columns[name] = set(used)
        return columns


def _are_disjoint(first: Mapping[str, set[int]], second: Mapping[str, set[int]]) -> bool:
    return all(
        columns and second[name] and not columns & second[name] for name, columns in first.items()
    )


def _runs(columns: set[int]) -> list[tuple[int, int]]:
    """(start, length) of each run of consecutive columns.

    >>> _runs({0, 1, 4, 5, 6})
    [(0, 2), (4, 3)]
    """
    runs: list[tuple[int, int]] = []
    for column in sorted(columns):
        if runs and column == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((column, 1))
    return runs


def _expected(parts: Sequence[int], units: int, unit: int) -> set[int]:
    """The columns of `unit` in packed parts of these sizes."""
    columns: set[int] = set()
    offset = 0
    for size in parts:
        length = size // units
        columns.update(range(offset + unit * length, offset + (unit + 1) * length))
        offset += size
    return columns


__all__ = ["find_plan"]
