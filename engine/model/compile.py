"""Compiles the model's blocks with torch.compile, each block separately and in place.

    block(x) ──> hooks: gather ──> forward: one graph, shared by all equal blocks ──> hooks: drop

The forward is compiled, not `__call__`: hooks stay outside, so a graph contains only arithmetic at every
ZeRO stage. Modules outside of blocks stay eager; a model without blocks is compiled as a whole. Activation
checkpointing is inside of the graph, where the compiler decides what is recomputed. It is outside where it
stores inputs elsewhere, and with backends that run graphs as they are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...utils.errors import ConfigError, UsageError
from ...utils.schema.section import Report, read_section
from ..config.compile import Compile
from ..config.config import Config
from .forwards import replace_forwards

if TYPE_CHECKING:
    from .recompute import Recomputing

log = logging.getLogger("xds")

Backend = str | Callable[..., Any]

# Blocks that differ (for example by a layer number used in forward) need one graph each, and one more for
# evaluation and for each other shape. torch compiles 8 for all of them together and runs the rest eagerly.
VARIANTS_A_BLOCK = 4


@final
class BlockCompiler:
    """Compiles the blocks of one model on demand; `undo` restores the eager forwards."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        config: Config,
        recomputing: Recomputing | None,
    ) -> None:
        """Nothing is compiled yet.

        Args:
            blocks: what is compiled, each of them alone. It may be the whole model, but not a part of one: the
                forward of a pipeline stage is another one in each run.
            recomputing: of `blocks`; None: nothing is recomputed.

        Raises:
            ConfigError: the section is enabled and names an unknown backend or option.
        """
        self._model = model
        self._blocks = list(blocks)
        self._config = config
        self._recomputing = recomputing
        self._settings: tuple[Backend, dict[str, Any]] | None = None
        self._undo: Callable[[], None] | None = None
        self._hooks: list[RemovableHandle] = []
        section = config.compile
        complaint = complaint_of(section) if section.enabled else None
        if complaint is not None:
            raise ConfigError([complaint], config.source)

    @property
    def is_compiled(self) -> bool:
        return self._settings is not None

    def compile(
        self,
        backend: Backend | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: object = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile from the next forward on. Arguments that are not given come from the config.

        Raises:
            UsageError: an argument is not supported, the model is already compiled with other settings, or
                a block has dropout and its layers are cut.
        """
        if schedule is not None:
            raise UsageError(
                "engine.compile(schedule=...): a schedule of passes belongs to DeepCompile, which is not "
                "supported yet; leave it out"
            )
        if compiled_autograd_enabled:
            raise UsageError(
                "engine.compile(compiled_autograd_enabled=True): hooks collect the gradients while backward "
                "runs, and a compiled backward runs the hooks too late; leave it out"
            )
        if self._settings is not None and backend is None and not compile_kwargs:
            return
        settings = self._read(backend, compile_kwargs or {})
        if self._settings == settings:
            return
        if self._settings is not None:
            raise UsageError(
                f"engine.compile({_shown(settings)}): the model is already compiled with "
                f'{_shown(self._settings)}; set it once, in the section "compile" of the config or here'
            )
        refuse_dropout(self._model, self._targets(), self._config)
        self._settings = settings
        chosen, arguments = settings
        change = partial(torch.compile, backend=chosen, **arguments, **self._limit())
        targets = self._targets()
        with self._around_graphs():
            self._undo = replace_forwards(targets, change)
        self._hooks = [
            target.register_forward_pre_hook(_prepare, with_kwargs=True)
            for target in targets
            if self._config.sequence_parallel_size > 1
        ]

    @property
    def modules(self) -> list[nn.Module]:
        """What is compiled, each of them alone."""
        return self._blocks

    def undo(self) -> None:
        """Restore the forwards of before `compile`."""
        if self._undo is not None:
            with self._around_graphs():
                self._undo()
        for hook in self._hooks:
            hook.remove()
        self._undo, self._hooks = None, []
        self._settings = None

    def _around_graphs(self) -> AbstractContextManager[None]:
        if self._recomputing is None:
            return nullcontext()
        return self._recomputing.around_graphs(plans=self._plans)

    @property
    def _plans(self) -> bool:
        """The backend decides what is recomputed; "eager" and its kind run a checkpoint as torch does.

        Experts of other ranks are outside of graphs, and torch compiles no checkpoint around such a call.
        """
        if self._settings is None or self._config.expert_parallel.enabled:
            return False
        return not str(self._settings[0]).startswith("eager")

    def _read(
        self, backend: Backend | None, given: Mapping[str, Any]
    ) -> tuple[Backend, dict[str, Any]]:
        section = self._config.compile
        chosen = section.backend if backend is None else backend
        report = Report()
        data = {
            "enabled": True,
            "backend": chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "custom"),
            "kwargs": {**section.arguments(), **given},
        }
        read = read_section(Compile, data, "engine.compile", report)
        if read is not None:
            read.check(self._config.zero_optimization.stage, report, "engine.compile")
        if read is None or report.complaints:
            raise UsageError("; ".join(report.complaints))
        problem = _problem(chosen, read.arguments())
        if problem:
            raise UsageError(f"engine.compile: {problem}")
        return chosen, read.arguments()

    def _targets(self) -> list[nn.Module]:
        """The modules to compile, without those that the script compiled itself."""
        found = self._blocks
        if _is_compiled(self._model):
            found = []
        targets = [module for module in found if not _is_compiled(module)]
        if len(targets) < len(self._blocks) and dist.get_rank() == 0:
            log.warning(
                "compile: the script itself compiled the model, or blocks of it; those stay as they are"
            )
        return targets

    def _limit(self) -> dict[str, int]:
        """A higher limit for blocks that differ, if this torch has the argument."""
        if "recompile_limit" not in inspect.signature(torch.compile).parameters:
            return {}
        usual: int = torch._dynamo.config.recompile_limit
        return {"recompile_limit": usual + VARIANTS_A_BLOCK * len(self._blocks)}


def _prepare(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Masks of sequence ranks exist before the graph of `block` runs."""
    from ...tensor.sequence.attention import ARGUMENT

    if ARGUMENT in kwargs:
        kwargs[ARGUMENT].prepare(block)


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or bool(module._compiled_call_impl)


def refuse_dropout(model: nn.Module, targets: Sequence[nn.Module], config: Config) -> None:
    """A graph cannot change the generator of random numbers where activations become cut.

    targets: the modules of `model` that are compiled.

    Raises:
        UsageError: they have dropout, and tensor ranks cut their layers.
    """
    size = config.tensor_parallel.size
    if size == 1:
        return
    from ...tensor.same_batches import has_dropout

    if any(has_dropout(part) for top in targets for part in top.modules()):
        raise UsageError(
            f"compile: blocks of {type(model).__name__} have dropout, and tensor_parallel.tp_size = "
            f"{size}: tensor ranks need different random numbers inside of a block, which a compiled one "
            "cannot draw; set the rates of dropout to 0, or compile.enabled to false"
        )


def complaint_of(section: Compile) -> str | None:
    """torch's complaint about the section; None: it has none."""
    problem = _problem(section.backend, section.arguments())
    return None if problem is None else f"compile: {problem}"


def _problem(backend: Backend, arguments: Mapping[str, Any]) -> str | None:
    """torch's complaint about these arguments, before anything is traced."""
    try:
        torch.compile(_nothing, backend=backend, **arguments)
    except Exception as error:  # torch has no common class for them
        names = ", ".join(torch._dynamo.list_backends(exclude_tags=()))
        return (
            f"torch.compile refuses {_shown((backend, arguments))}: {error}; backends here: {names}"
        )
    return None


def _nothing() -> None:
    return


def _shown(settings: tuple[Backend, Mapping[str, Any]]) -> str:
    backend, arguments = settings
    return ", ".join(
        f"{name} = {value!r}" for name, value in {"backend": backend, **arguments}.items()
    )
