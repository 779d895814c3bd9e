"""What `initialize` chose for one engine: one object for each feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..ops.comm.collectives import Collectives
from ..utils.errors import PeerError, UsageError
from ..zero.model.sharded_model import ShardedModel
from ..zero.model.update import Updater
from .config.config import Config
from .counters import Counters
from .means import StepMeans
from .optim.loss_scale import GradientFactor, LossScale
from .telemetry.report import StepReport

if TYPE_CHECKING:
    from ..zero.checkpoint.restore import Restore
    from ..zero.checkpoint.snapshot import Snapshot, StateBlock
    from ..zero.checkpoint.targets import Target
    from ..zero.core.reduction import StepStatus
    from ..zero.model.auto_ratio import AutoRatio
    from .optim.schedule_base import Scheduler


Result = TypeVar("Result")


class Saving(Protocol):
    """The part of an engine that is needed to save its states."""

    global_steps: int

    @property
    def last_client_state(self) -> Mapping[str, Any] | None: ...
    def save_checkpoint(self, save_dir: str, *, client_state: Any = None) -> bool: ...
    def wait_for_checkpoint(self) -> None: ...


class CheckpointWriter(Protocol):
    """Writes the files of checkpoints, in the background where the config says so."""

    keep_last: int

    def save(self, job: Any, entries: Any) -> None: ...
    def wait(self, recovery: Any = ...) -> None: ...
    def abandon(self) -> str: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def progress(self) -> Any: ...


class Compiler(Protocol):
    """Compiles the model's blocks; `undo` restores the eager ones."""

    @property
    def is_compiled(self) -> bool: ...
    @property
    def modules(self) -> Sequence[nn.Module]: ...
    def compile(self, *args: Any, **kwargs: Any) -> None: ...
    def undo(self) -> None: ...


class Preemption:
    """How one engine reacts to a signal to stop: by default not, so it has its usual effect on the process."""

    is_asked = False  # what this rank says in the message of its steps

    def begin(self, engine: Saving) -> None:
        """The engine is ready."""
        return

    def agree(self, status: StepStatus) -> None:
        """What the ranks said in the message of the step that runs."""
        return

    def boundary(self) -> None:
        """A step has ended. If it is the last step after a signal, all states are saved here."""
        return

    def check(self) -> None:
        """A step begins. Raises Preempted if all states are saved."""
        return

    def end(self) -> None:
        """The engine takes no more steps."""
        return


class SaveInterval:
    """When it is time for a checkpoint: by default the script decides."""

    is_asked = False  # what this rank says in the message of its steps

    def agree(self, status: StepStatus) -> None:
        """What the ranks said in the message of the step that runs."""
        return

    def is_due(self) -> bool:
        """It is time for a checkpoint; the same on all ranks. Raises UsageError: nothing says when."""
        raise UsageError(
            "engine.should_save() without checkpoint.interval: set it to seconds between two saves, or to "
            '"auto", in the config'
        )

    def saved(self, seconds: float) -> None:
        """A save has stopped training for so long."""
        return

    def dropped(self) -> None:
        """The running step is dropped, because a rank has failed."""
        return


class Recovery:
    """What happens when a collective fails, because another rank has: by default it raises PeerError.

    A context for calls that are collective: with recovery it ends them, and `has_lost` is true afterwards.
    """

    is_on = False
    has_lost = False
    must_regroup = False  # what this rank says in the message of its steps
    generation = 0  # of the groups
    has_taken_over = False  # this process has the states of a lost one, and has not trained yet

    def bind(self, parts: Parts, counters: Counters, step: Any, states: Any) -> None:
        """The pieces of the engine."""
        return

    def begin(self) -> None:
        """The engine is ready. A collective."""
        return

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return isinstance(error, PeerError) and self.takes_failure()

    def takes_failure(self) -> bool:
        """A collective has failed. Returns whether `recover` will follow, and not the error."""
        return False

    def settle(self, error: PeerError) -> StepStatus:
        """The message of a step has failed. Returns it, if other ranks have got it, so that the step counts.

        Raises `error`: none has.
        """
        raise error

    def agree(self, status: StepStatus) -> None:
        """What the ranks said in the message of the step that runs."""
        return

    def begin_step(self) -> None:
        """A forward or backward that trains begins: if other ranks wait to take part, they do from now on.

        A collective then.
        """
        return

    def before_vote(self) -> None:
        """This rank is about to send its part of the norm, after which masters may change."""
        return

    def commit(self) -> None:
        """A step has ended on this rank."""
        return

    def loaded(self, path: str) -> None:
        """The engine goes on from the checkpoint in this folder."""
        return

    def keep(self) -> None:
        """The script is about to wait between two steps, and cannot go back from there: a run that goes back
        goes back to here. Raises PeerError: a rank has failed meanwhile.
        """
        return

    def recover(self, *, stays: bool = False) -> None:
        """After a failure: return when the group is whole again, and the running step is dropped.

        stays: the script waits between two steps: see `keep`.
        """
        raise AssertionError("the failure was raised")

    def has_saved(self, save_dir: str | Path, tag: str) -> bool:
        """The script asks for a save that this run has made, or makes, before this process came here."""
        return False

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """A collective call between two steps. Returns None if other ranks alone have ended it."""
        return call(*args)

    def is_replaced(self) -> bool:
        """A rank has failed, and `recover` has not noticed yet. Does not wait."""
        return False

    def refuse(self, call: str) -> None:
        """Raises UsageError: the script calls what would change the samples of a step."""
        return

    def end(self) -> None:
        """The engine takes no more steps."""
        return


class OuterLoop:
    """How groups of ranks that train alone meet: by default there is one group, and it has all ranks."""

    is_on = False
    num_groups = 1
    number = 0  # of this rank's group
    opened: Sequence[Collectives] = ()  # between the groups

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of its states on this rank, by kind."""
        return {}

    def calls(self) -> Recovery:
        """What lets other groups call this one in the message of a step."""
        return Recovery()

    def bind(self, parts: Parts, counters: Counters) -> None:
        """The pieces of the engine."""
        return

    def begin(self) -> None:
        """The engine is ready. For all ranks of all groups."""
        return

    def advance(self, weight: float) -> None:
        """A step has ended, which `weight` items count. For all groups, after steps in which some meet.

        Raises XdsError: the parameters of a group are not finite.
        """
        return

    def save(self, folder: str | Path, save: Callable[[str | Path], Result]) -> Result:
        """`save` into the folder of this group. For all ranks of all groups."""
        return save(folder)

    def load(
        self,
        folder: str | Path,
        tag: str | None,
        load: Callable[[str | Path, str | None], Result],
        *,
        falls_back: bool,
    ) -> Result:
        """`load` the checkpoint of this group, of the tag that group 0 has. For all ranks of all groups."""
        return load(folder, tag)

    def of_first(self, value: bool) -> bool:
        """What group 0 says. For all ranks of all groups."""
        return value

    def blocks(self, snapshot: Snapshot) -> Sequence[StateBlock]:
        """What a checkpoint has of this rank."""
        return ()

    def state(self) -> dict[str, Any]:
        """What it has of this group."""
        return {}

    def targets(self, restore: Restore) -> Sequence[Target]:
        """Where a load reads the `blocks` to."""
        return ()

    def restored(self, state: Any) -> None:
        """They are read. state: of the checkpoint; None: it has none."""
        return

    def end(self) -> None:
        """The engine takes no more steps."""
        return


class ModelSchedules:
    """What acts on the model by the number of the step: by default nothing does."""

    @property
    def names(self) -> Mapping[str, Any]:
        """Methods and attributes that the engine has as well."""
        return {}

    def attach(
        self, model: nn.Module, sharded: ShardedModel, compiler: Compiler
    ) -> Callable[[], None]:
        """Put it on `model`, the part of this rank, after all other hooks; what it returns takes it off."""
        return _nothing

    def begin(self, counters: Counters) -> None:
        """The engine is ready, and counts its steps in `counters`."""
        return

    def set_function(self, function: Any) -> None:
        """The difficulty of the section curriculum_learning by the step."""
        return

    def enter(self, micro_batch: int) -> None:
        """A pipeline runs a stage for this micro-batch of the current step, forward or backward."""
        return


class Packing:
    """How forwards treat the rows of data_packing: by default there are none."""

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a forward of packed rows."""
        return dict(kwargs)

    def apart(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Around that forward: attention masks the samples of a row from each other."""
        return nullcontext()

    def trial(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Forwards that prove it, before this one is trained; None: nothing is to be proven. For all ranks.

        For the first micro-batch of a step, as ranks may run unequal numbers of them.
        """
        return None

    def judge(self, trial: Any) -> None:
        """The forwards of the trial have run. A collective.

        Raises UsageError: samples of a row are not apart.
        """
        return

    def rejoin(self, *, is_new: bool) -> None:
        """Ranks go on after a failure, and with what forwards of any of them have proven. A collective.

        is_new: this process has run none.
        """
        return


class AfterSteps(Protocol):
    """What follows each step: the schedule of compressed weights, the tokens of experts."""

    def begin(self) -> None:
        """The engine is ready. A collective."""

    def advance(self, step: int) -> None:
        """So many steps have updated the parameters. A collective."""

    def resume(self, step: int) -> None:
        """The same after a load."""


class LossCheck:
    """Looks at each loss before its backward: by default not at all."""

    def check(self, loss: Tensor) -> None:
        """Raises UsageError: the loss was computed in a way that this config does not have."""
        return


class KeptUnits:
    """What stays gathered after forwards without gradients: by default nothing."""

    def keep(self, *, is_asked: bool) -> None:
        """The engine is in evaluation mode from now on, or no more."""
        return

    def before_forward(self) -> None:
        """The module's forward is about to run. A collective at the first one of an evaluation."""
        return


class UnevenForwards:
    """How ranks run unequal numbers of forwards: by default each alone, where no parameters are gathered."""

    def running(
        self, autocast: Callable[[], AbstractContextManager[None]], *, streams: bool
    ) -> AbstractContextManager[None]:
        """Around these forwards, without backward. For all ranks.

        autocast: around each forward. streams: forwards gather parameters.
        """
        return nullcontext()


class LoopFactory(Protocol):
    """Makes the loop of train_batch and eval_batch."""

    def __call__(self, parts: Parts, step: Any, counters: Counters) -> Any: ...


@dataclass
class Parts:
    """The pieces of an engine."""

    config: Config
    module: nn.Module
    sharded: ShardedModel
    updater: Updater
    auto_ratio: AutoRatio | None
    optimizer: Any  # None: a frozen model
    scheduler: Scheduler | None
    loss_scale: LossScale
    means: StepMeans
    gradient_factor: GradientFactor
    loss_check: LossCheck
    kept_units: KeptUnits
    autocast: Callable[[], AbstractContextManager[Any]]
    cast_inputs: torch.dtype | None
    report: StepReport
    loader: Any
    undo: list[Callable[[], None]]  # for the end, the last one first
    compiler: Compiler
    saver: CheckpointWriter | None  # None: no checkpoint was saved yet; `States` makes it
    preemption: Preemption
    recovery: Recovery
    saves: SaveInterval
    outer: OuterLoop
    schedules: ModelSchedules
    after_steps: Sequence[AfterSteps]
    packing: Packing
    opened: list[Collectives]  # of all groups that this engine uses
    loop: LoopFactory
    uneven: UnevenForwards

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.sharded.collectives.device


def _nothing() -> None:
    return
