"""DeepSpeed's names for layers and tokens that are dropped: `ProgressiveLayerDrop`, `convert_to_random_ltd`.

The engine does the work, see engine/dropping/. The layers keep their names, so state dicts need no change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, final

from ....utils.errors import UsageError
from ...data.schedules import LayerDrop
from ...dropping.tokens import TokenDropping
from ...engine import Engine
from ..errors import methods_raise_theirs, raises_theirs

T = TypeVar("T")
INSIDE = ".random_ltd_layer"  # DeepSpeed's wrapper of a layer, in names
_NEEDS = (
    "{}: the engine of a config with data_efficiency.data_routing.random_ltd.enabled = true is needed; call it "
    "with what initialize returned"
)


@final
@methods_raise_theirs
class ProgressiveLayerDrop:
    """theta by the step, for loops of one's own. In an engine the config's section does this."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self._schedule = LayerDrop(theta, gamma)
        self.theta, self.gamma = theta, gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """The keywords of a model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Go to a step."""
        self.current_theta = self._schedule.at(global_step)


@final
@methods_raise_theirs
class LegacyCurriculum:
    """`engine.curriculum_scheduler_legacy`: the difficulty by the step. Nothing is kept between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Any = engine  # Any: the config adds the methods that are called here

    def get_current_difficulty(self) -> Any:
        """That of the next training forward."""
        return self._engine.get_curriculum_difficulty()

    def get_difficulty(self, global_steps: int) -> Any:
        """That of a step: forwards get the one of the step that they begin, counted from 1."""
        return self._engine.get_curriculum_difficulty(global_steps - 1)

    update_difficulty = get_difficulty

    def set_custom_get_difficulty(self, schedule_function: Any) -> None:
        """The function of schedule_type "custom"."""
        self._engine.set_custom_curriculum_learning_schedule(schedule_function)


@raises_theirs
def convert_to_random_ltd(model: T, convert_type: type) -> T:
    """Let layers of the class `convert_type` drop tokens, those in the config's random_ltd_layer_id.

    model: what `initialize` returned.

    Raises:
        UsageError: it is no engine with random-LTD, or a number matches no layer of this class, or several.
    """
    engine: Any = model
    convert = getattr(engine, "drop_tokens_in", None)
    if convert is None:
        raise UsageError(_NEEDS.format("convert_to_random_ltd"))
    convert(convert_type)
    return model


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """The state dict of an engine or a module, under the names of layers without DeepSpeed's wrapper."""
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` of a model with DeepSpeed's wrappers, under the names without them."""
    return {key.replace(INSIDE, ""): value for key, value in state_dict.items()}


@final
@methods_raise_theirs
class RandomLTDScheduler:
    """`engine.random_ltd_scheduler`: the tokens that layers keep, and how many were computed.

    Its state is a function of the step, so that there is nothing to save.
    """

    def __init__(self, dropping: TokenDropping, samples: int) -> None:
        """samples: of a step, over all ranks."""
        section = dropping.section
        self._dropping, self._samples = dropping, samples
        self.model_layer_num = section.total_layer_num
        self.random_ltd_layer_num = section.random_ltd_layer_num

    def get_current_seq(self) -> int:
        return self._dropping.num_kept

    def get_random_ltd_layer_num(self) -> int:
        return self.random_ltd_layer_num

    def get_value(self, global_steps: int) -> int:
        return self._dropping.schedule.at(global_steps)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """The tokens that all layers compute in so many steps."""
        layers = (self.model_layer_num, self.random_ltd_layer_num)
        schedule = self._dropping.schedule
        return sum(
            schedule.layer_tokens(step, self._samples, *layers) for step in range(train_iters)
        )

    @property
    def state(self) -> dict[str, Any]:
        """Values of the last step of which a forward has begun."""
        schedule = self._dropping.schedule
        return {
            "min_value": schedule.min_value,
            "max_value": schedule.max_value,
            "current_value": self.get_current_seq(),
            "current_steps": self._dropping.step,
            "consumed_layer_tokens": self.get_total_layer_tokens(self._dropping.step + 1),
        }

    def get_state(self) -> dict[str, Any]:
        return self.state

    state_dict = get_state
