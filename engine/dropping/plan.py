"""Chooses what acts on a model by the step, as the config says, before the model is divided.

The hook of the model's forward chooses for each micro-batch; in a pipeline the executor does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from torch import nn

from ...ops.torch_internals import in_backward
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...zero.layout.discover import found_blocks, named_blocks
from ..config.config import Config
from ..data.schedules import LayerDrop
from ..model.arguments import is_cut, is_part
from ..parts import Compiler, ModelSchedules
from .config import SEQLEN as SEQLEN_TYPE
from .keywords import PLD, SEQLEN, reads, takes
from .layers import KEY, LayerDropping, Places, places_of
from .tokens import TokenDropping

if TYPE_CHECKING:
    from ...zero.model.sharded_model import ShardedModel
    from ..counters import Counters

_MODEL = "progressive_layer_drop.keywords"


@final
class Schedules(ModelSchedules):
    """What acts on one model. `attach` puts it on; what that returns takes it off."""

    def __init__(self, model: nn.Module, config: Config, data_rank: int, data_ranks: int) -> None:
        """Plan for the whole `model`.

        Raises:
            UsageError: the model does not fit to the sections, in one sentence.
        """
        self._config = config
        self._is_whole = not is_cut(model, config)
        self._counters: Counters | None = None
        self._function: Callable[[int], Any] | None = None  # of the curriculum "custom"
        self._keywords: list[Callable[[int], dict[str, Any]]] = []
        self._places: Places = {}
        self._layers: LayerDropping | None = None
        self._tokens: TokenDropping | None = None
        self._blocks: list[tuple[str, nn.Module]] = []  # of the whole model, or of this stage
        self._model = model
        self._sharded: ShardedModel | None = None
        self._compiler: Compiler | None = None
        section = config.progressive_layer_drop
        self.theta = LayerDrop(section.theta, section.gamma)
        is_compiled = hasattr(model, "_orig_mod") or _is_compiled(model)
        if is_compiled and not is_part(model):
            raise _compiled(
                KEY if section.enabled else "curriculum_learning or random_ltd", "the model"
            )
        if section.enabled:
            self._plan_layers(model)
        if config.curriculum_learning.enabled:
            self._plan_curriculum(model)
        if config.data_efficiency.drops_tokens:
            self._plan_tokens(model, data_rank, data_ranks)

    # -- before the model is divided ------------------------------------------------------------------------

    def _plan_layers(self, model: nn.Module) -> None:
        section = self._config.progressive_layer_drop
        by_model = section.keywords
        if by_model is None:
            by_model = not section.blocks and not is_part(model)
            by_model = by_model and reads(model, PLD[1]) and takes(model, *PLD)
        if by_model:
            self._check_keywords(model)
            self._keywords.append(lambda step: {PLD[0]: True, PLD[1]: self.theta_at(step)})
            return
        if is_part(model):
            raise UsageError(
                f"{KEY} with a PipelineModule: its layers are built on their stages and pass on what they "
                "like, so blocks cannot be found; pass the model itself, or remove the section"
            )
        found = (
            named_blocks(model, section.blocks, f"{KEY}.blocks")
            if section.blocks
            else blocks_in(model)
        )
        if not found:
            raise UsageError(
                f"{KEY}: {type(model).__name__} has no list of equal blocks that could be dropped; name the "
                f"residual blocks in {KEY}.blocks, or let the model's forward take {PLD[0]} and {PLD[1]}"
            )
        _check_own(found, KEY)
        self._places = places_of(found)

    def _check_keywords(self, model: nn.Module) -> None:
        config = self._config
        if is_cut(model, config):
            raise UsageError(
                f"{_MODEL}: pipeline stages get no keywords, also in DeepSpeed; set it to false, and the "
                "engine drops the model's blocks itself"
            )
        if not takes(model, *PLD):
            raise UsageError(
                f"{_MODEL} = true: the forward of {type(model).__name__} does not take {PLD[0]} and {PLD[1]}; "
                "add these parameters, or set it to false, and the engine drops the model's blocks itself"
            )
        zero = config.zero_optimization
        if zero.stage == 3 and config.world_size > 1 and not zero.divergent_graphs:
            raise UsageError(
                f"{_MODEL}: the model draws which layers run, and at stage 3 ranks with other draws would wait "
                "for one another for ever; set it to false, and the engine drops the same blocks on all ranks, "
                "or zero_optimization.divergent_graphs to true, or the stage to 2"
            )

    def _plan_curriculum(self, model: nn.Module) -> None:
        section = self._config.curriculum_learning
        if section.curriculum_type != SEQLEN_TYPE or not self._is_whole:
            return  # the script cuts its batches
        if not reads(model, SEQLEN):
            raise UsageError(
                f"curriculum_learning: the forward of {type(model).__name__} does not take {SEQLEN}; add the "
                "parameter and cut tokens, labels and masks to that length, or remove the section and cut the "
                "batches in the script by deepspeed.runtime.data_pipeline.curriculum_scheduler"
            )
        self._keywords.append(lambda step: {SEQLEN: self.difficulty(step)})

    def _plan_tokens(self, model: nn.Module, data_rank: int, data_ranks: int) -> None:
        if is_part(model):
            raise UsageError(
                "random_ltd with a PipelineModule: its layers pass on what they like, so tokens cannot be "
                "found in it; pass the model itself, or remove the section"
            )
        efficiency = self._config.data_efficiency
        section = efficiency.data_routing.random_ltd
        self._tokens = TokenDropping(
            section, efficiency.seed, data_rank=data_rank, data_ranks=data_ranks
        )
        self._blocks = found_blocks(model, self._config.zero_optimization.units)

    def with_units(self, config: Config) -> Config:
        """The config with a unit for each block that may be dropped: it is gathered and reduced alone."""
        zero = config.zero_optimization
        if not self._places or "unit_min_numel" in zero.model_fields_set:
            return config
        zero = zero.model_copy(update={"unit_min_numel": 0})
        return config.model_copy(update={"zero_optimization": zero})

    # -- on the model ---------------------------------------------------------------------------------------

    def attach(
        self, model: nn.Module, sharded: ShardedModel, compiler: Compiler
    ) -> Callable[[], None]:
        """Put it on `model`, the part that this rank has. After all other hooks."""
        self._model, self._sharded, self._compiler = model, sharded, compiler
        here = set(model.modules())
        undo: list[Callable[[], None]] = []
        if self._places:
            own = {block: place for block, place in self._places.items() if block in here}
            section = self._config.progressive_layer_drop
            self._layers = LayerDropping(own, self.theta, section.seed)
            undo.append(self._layers.begin())
        if self._tokens is not None:
            self._blocks = [(name, block) for name, block in self._blocks if block in here]
            undo.append(self._tokens.restore)
        if self._is_whole:
            handle = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            undo.append(handle.remove)

        def undo_all() -> None:
            for one in reversed(undo):
                one()

        return undo_all

    def begin(self, counters: Counters) -> None:
        self._counters = counters

    def enter(self, micro_batch: int) -> None:
        """Choose for a micro-batch of the current step. Returns nothing; a pipeline calls it."""
        self._choose(micro_batch)

    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook of the model's forward."""
        assert self._counters is not None and self._sharded is not None
        if in_backward():  # it is recomputed: what was chosen counts
            return None if not (model.training and self._keywords) else (args, self._named(kwargs))
        if not model.training:
            self._sharded.leave_out((), in_backward=False)
            return None
        self._choose(self._counters.accumulation.micro_batch)
        return (args, self._named(kwargs)) if self._keywords else None

    def _named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        for keyword in self._keywords:
            kwargs = {**kwargs, **keyword(self.step)}
        return kwargs

    def _choose(self, micro_batch: int) -> None:
        assert self._sharded is not None and self._compiler is not None
        if self._layers is not None:
            if self._compiler.is_compiled:
                self._check_compiled({block: at[0] for block, at in self._places.items()}, KEY)
            dropped = self._layers.enter(self.step, micro_batch)
            if self._is_whole:
                self._sharded.leave_out(dropped, in_backward=True)
        if self._tokens is not None:
            if not self._tokens.is_converted:
                self._convert(self._blocks)
            if self._compiler.is_compiled:
                self._check_compiled(self._tokens.layers, "random_ltd")
            self._tokens.enter(self.step, micro_batch)

    def _check_compiled(self, blocks: Mapping[nn.Module, str], key: str) -> None:
        """A graph cannot leave out a part of itself.

        Raises:
            UsageError: a block that is dropped, or drops tokens, is inside of what was compiled.
        """
        assert self._compiler is not None
        tops = self._compiler.modules
        inside = {part for top in tops for part in top.modules() if part is not top}
        for block, name in blocks.items():
            if block in inside:
                raise UsageError(
                    f"{key}: {name} is inside of a module that is compiled as a whole, and a graph cannot "
                    "leave out a part of itself; choose blocks that are compiled alone, or do not compile"
                )

    def convert(self, kind: type) -> None:
        """Let layers of this class drop tokens, those with the numbers in random_ltd_layer_id.

        Raises:
            UsageError: it is no class of modules, or a number matches no layer, or several.
        """
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise wrong(
                "convert_to_random_ltd: convert_type", kind, "the class of the model's layers"
            )
        self._convert(
            [found for found in self._model.named_modules() if isinstance(found[1], kind)]
        )

    def _convert(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        assert self._tokens is not None
        _check_own(layers, "random_ltd")
        self._tokens.convert(layers, is_whole=self._is_whole)

    # -- readings -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The steps until now."""
        return 0 if self._counters is None else self._counters.global_steps

    def theta_at(self, step: int) -> float:
        """theta of the layer drop: 1 in the first step, as in DeepSpeed."""
        return self.theta.at(step) if step else 1.0

    def difficulty(self, step: int) -> Any:
        """That of the training forwards after `step` steps: of step + 1, as in DeepSpeed."""
        return self._config.curriculum_learning.schedule(self._function).at(step + 1)

    def get_difficulty(self, step: int | None = None) -> Any:
        """The difficulty of the next training forward, or of the one after `step` steps."""
        return self.difficulty(self.step if step is None else step)

    @property
    def names(self) -> Mapping[str, Any]:
        """Methods of the engine that the sections add."""
        found: dict[str, Any] = {}
        if self._config.progressive_layer_drop.enabled:
            found["get_pld_theta"] = lambda: self.theta_at(self.step)
            found["pld_enabled"] = lambda: True
        if self._config.curriculum_learning.enabled:
            found["get_curriculum_difficulty"] = self.get_difficulty
        if self._tokens is not None:
            found["drop_tokens_in"] = self.convert
            found["token_dropping"] = self._tokens
        return found

    def set_function(self, function: Any) -> None:
        """The difficulty by the step, for schedule_type "custom".

        function: a function of the step, or a dict whose only value is one.
        """
        if isinstance(function, Mapping) and len(function) == 1:
            function = next(iter(function.values()))
        if not callable(function):
            raise UsageError(
                "set_custom_curriculum_learning_schedule: needs a function of the step, such as "
                "lambda step: 64 + 8 * (step // 100)"
            )
        if self._config.curriculum_learning.schedule_type != "custom":
            raise UsageError(
                "set_custom_curriculum_learning_schedule: curriculum_learning.schedule_type is "
                f'"{self._config.curriculum_learning.schedule_type}"; set it to "custom"'
            )
        self._function = function


def blocks_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks that may be residual: of each list those of a class that is there twice, with parts."""
    found = found_blocks(model)
    counts: dict[tuple[str, type], int] = {}
    for name, block in found:
        key = (name.rpartition(".")[0], type(block))
        counts[key] = counts.get(key, 0) + 1
    return [
        (name, block)
        for name, block in found
        if counts[name.rpartition(".")[0], type(block)] > 1
        and next(block.children(), None) is not None
    ]


def _is_compiled(module: nn.Module) -> bool:
    """The script compiled it in place, so that hooks and calls are inside of its graph."""
    return module._compiled_call_impl is not None


def _check_own(blocks: Sequence[tuple[str, nn.Module]], key: str) -> None:
    for name, block in blocks:
        if _is_compiled(block) or hasattr(block, "_orig_mod"):
            raise _compiled(key, name)


def _compiled(key: str, what: str) -> UsageError:
    return UsageError(
        f"{key}: the script has compiled {what}, and what a graph does cannot change by the step; leave it to "
        "the config's section compile, which compiles each block alone"
    )


__all__ = ["Schedules", "blocks_in"]
