"""An `Accelerator` that prepares the model and optimizer with an engine: two changed lines in a script.

    from xds.engine.integrations.accelerate import Accelerator
    accelerator = Accelerator(xds_config="zero3.json")

It overrides only public methods of accelerate's class. Without `xds_config` it behaves like that class. See
docs/design/huggingface.md.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from ...zero.access.gathered import GatheredParameters
from ..config.config import Config
from ..initialize import initialize
from ..optim.schedules import build_scheduler
from .accelerate_values import batch_values, optimizer_values, schedule_values
from .given import Given, Source, hidden_size_of, precision, sized_by
from .optional import need

need("accelerate", "xds.engine.integrations.accelerate", "huggingface")

import accelerate  # noqa: E402 (only where it is installed)
from accelerate.scheduler import AcceleratedScheduler  # noqa: E402
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler  # noqa: E402

from .prepared import EngineModel, EngineOptimizer  # noqa: E402

ENGINE_TAG = "xds_engine"  # the folder of the engine's states inside a saved state
OTHER_BACKENDS = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin"),
    *("megatron_lm_plugin", "parallelism_config"),
)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, whose `prepare` builds an engine. It can be subclassed in the same way.

    One Accelerator trains one model. Pass the model to `prepare` together with its optimizer (or a
    `DummyOptim` if the config names the optimizer). Models without an optimizer are only moved.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, xds_config: Any = None, **kwargs: Any) -> None:
        """
        Args:
            xds_config: a path, JSON text, a dict or a filled `xds.Config`; None: accelerate without xds.
        Raises:
            UsageError: a second backend is requested, or accelerate does not see the launcher's ranks.
            ConfigError: the config cannot be read.
        """
        self._engine_model: EngineModel | None = None
        self._requested_precision: str | None = None
        self.xds_config = xds_config
        self.xds_source: Source | None = None
        if xds_config is None:
            super().__init__(*args, **kwargs)
            return
        if not isinstance(xds_config, Config):
            self.xds_source = Source(xds_config)
        for name in OTHER_BACKENDS:
            if kwargs.get(name) is not None:
                raise UsageError(f"{name} and xds_config are both given: keep one of them")
        if len(args) > 2:
            raise UsageError("Accelerator(xds_config=...): pass the other arguments by name")
        requested = kwargs.pop("mixed_precision", None)
        self._requested_precision = requested or os.environ.get("ACCELERATE_MIXED_PRECISION")
        if not torch.cuda.is_available():
            kwargs.setdefault("cpu", True)  # otherwise accelerate counts one process
        # the engine handles precision: no autocast and no scaler around it
        super().__init__(*args, mixed_precision="no", **kwargs)
        check_ranks(self.num_processes, "Accelerator(cpu=True) on CPUs")

    # -- building ---------------------------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        """The engine of the model that is trained, or None before `prepare`."""
        return None if self._engine_model is None else self._engine_model.engine

    @property
    def trained_model(self) -> Any:
        """The model that `prepare` returned for training, or None before."""
        return self._engine_model

    def use_config(self, config: Config) -> None:
        """Build the next engine from `config`, which is completely filled in."""
        self.xds_config, self.xds_source = config, None

    @property
    def mixed_precision(self) -> str:
        """ "bf16", "fp16" or "no": from the config; before `prepare` from the script's arguments."""
        if self.xds_config is None:
            return str(super().mixed_precision)
        if self.engine is None:
            return self._requested_precision or "no"
        config = self.engine.config
        autocast = config.torch_autocast.dtype if config.torch_autocast.enabled else "no"
        return "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else str(autocast)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As in accelerate. A model with its optimizer becomes an engine; a model alone is only moved."""
        if self.xds_config is None:
            return super().prepare(*args, device_placement=device_placement)
        fresh = [obj for obj in args if not isinstance(obj, (EngineModel, EngineOptimizer))]
        models = [obj for obj in fresh if isinstance(obj, nn.Module)]
        optimizers = [obj for obj in fresh if isinstance(obj, (torch.optim.Optimizer, DummyOptim))]
        made: dict[int, Any] = {}
        if optimizers:
            trained = [
                model for model in models if any(p.requires_grad for p in model.parameters())
            ]
            self._check_pair(trained, optimizers)
            scheduler = next((obj for obj in args if isinstance(obj, DummyScheduler)), None)
            config = self._filled(trained[0], optimizers[0], scheduler, args)
            self._build(trained[0], optimizers[0], config)
            made[id(trained[0])] = self._models[-1]
            made[id(optimizers[0])] = self._optimizers[-1]
            if scheduler is not None:
                made[id(scheduler)] = self._schedule(scheduler, config)
        return self._rest(args, made, device_placement)

    def _rest(self, args: tuple[Any, ...], made: dict[int, Any], device_placement: Any) -> Any:
        others = [obj for obj in args if id(obj) not in made]
        if device_placement is not None:
            device_placement = [
                flag
                for obj, flag in zip(args, device_placement, strict=True)
                if id(obj) not in made
            ]
        done = super().prepare(*others, device_placement=device_placement) if others else ()
        done = iter(done if len(others) > 1 else (done,))
        result = tuple(made[id(obj)] if id(obj) in made else next(done) for obj in args)
        return result if len(result) > 1 else result[0]

    def _check_pair(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        if len(models) != 1 or len(optimizers) != 1:
            raise UsageError(
                f"prepare() got {len(models)} trainable models and {len(optimizers)} optimizers: pass one "
                "model and its optimizer in one call; a second trained model needs its own Accelerator"
            )
        if self._engine_model is not None:
            raise UsageError(
                "this Accelerator already trains a model: create another Accelerator, or call "
                "free_memory(model, optimizer) first"
            )
        named = self._names("optimizer")
        if named and not isinstance(optimizers[0], DummyOptim):
            raise UsageError(
                "the config has a section optimizer, and prepare() got an optimizer: remove the section, or "
                "pass accelerate.utils.deepspeed.DummyOptim(model.parameters()) instead"
            )
        if not named and isinstance(optimizers[0], DummyOptim):
            raise UsageError("DummyOptim needs a section optimizer in the config: add one")

    def _names(self, section: str) -> bool:
        if self.xds_source is not None:
            return self.xds_source.has_section(section)
        return getattr(self.xds_config, section) is not None

    def _filled(
        self, model: nn.Module, optimizer: Any, scheduler: Any, args: tuple[Any, ...]
    ) -> Config:
        if self.xds_source is None:
            config: Config = self.xds_config
            return config
        data_ranks = self.xds_source.data_ranks(self.num_processes)
        values: dict[str, Given] = {
            **batch_values([*args, *self._dataloaders], self, data_ranks),
            **optimizer_values(optimizer),
            **sized_by(hidden_size_of(model)),
        }
        requested = self._requested_precision
        switches = {
            name: Given(
                requested == name,
                f'Accelerator(mixed_precision="{requested}")',
                is_checked=bool(requested),
            )
            for name in ("bf16", "fp16")
        }
        values |= precision(self.xds_source, **switches, is_default=True)
        if self.xds_source.has_section("scheduler"):
            values |= schedule_values(scheduler)
        return self.xds_source.filled(values, logs=True)

    def _build(self, model: nn.Module, optimizer: Any, config: Config) -> None:
        is_named = isinstance(optimizer, DummyOptim)
        engine = initialize(
            model,
            # the script steps schedules, as with accelerate
            config.model_copy(update={"scheduler": None}),
            optimizer=None if is_named else optimizer,
            model_parameters=optimizer.params if is_named else None,
        )
        self._engine_model = EngineModel(engine)
        self._models.append(self._engine_model)
        self._optimizers.append(EngineOptimizer(self._engine_model))

    def _schedule(self, given: Any, config: Config) -> AcceleratedScheduler:
        optimizer = self._optimizers[-1]
        if given.lr_scheduler_callable is not None:
            built = given.lr_scheduler_callable(optimizer)
        elif config.scheduler is not None:
            built = build_scheduler(config.scheduler, optimizer)
        else:
            raise UsageError("DummyScheduler needs a section scheduler in the config: add one")
        # one step of the schedule per update, for any number of ranks
        prepared = AcceleratedScheduler(built, optimizer, split_batches=True)
        self._schedulers.append(prepared)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model that is not trained to the device. To train it, pass it to `prepare`."""
        evaluates = evaluation_mode or self.xds_config is not None
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluates)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As in accelerate; with xds, pass an optimizer to `prepare` together with its model."""
        if self.xds_config is not None and not isinstance(optimizer, EngineOptimizer):
            raise UsageError(
                "prepare_optimizer(): pass the model and its optimizer to prepare() together"
            )
        return super().prepare_optimizer(optimizer, device_placement)

    # -- training ---------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """The engine's backward of `loss` / accumulation steps. A collective."""
        if self.xds_config is None:
            super().backward(loss, **kwargs)
            return
        unknown = kwargs.keys() - {"retain_graph"}
        if unknown:
            raise UsageError(
                f"accelerator.backward({', '.join(unknown)}=...): only retain_graph is supported"
            )
        steps = self.gradient_accumulation_steps
        self._trained("backward").backward(
            loss / steps if steps > 1 else loss, is_last=self.sync_gradients, **kwargs
        )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Does nothing: `sync_gradients` shows the engine which backward is the last of its step."""
        if self.xds_config is not None:
            yield
            return
        with super().no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The 2-norm of all gradients over all ranks; the next step clips to `max_norm`. A collective."""
        if self.xds_config is None:
            norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        if norm_type != 2:
            raise UsageError(f"clip_grad_norm_(norm_type={norm_type}): only 2 is supported")
        return self._trained("clip_grad_norm_").clip(parameters, max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self.xds_config is not None:
            raise UsageError("clip_grad_value_ is not supported with xds: use clip_grad_norm_")
        super().clip_grad_value_(parameters, clip_value)

    def _trained(self, doing: str) -> EngineModel:
        if self._engine_model is None:
            raise UsageError(
                f"accelerator.{doing}() before a model was prepared with its optimizer: call "
                "model, optimizer = accelerator.prepare(model, optimizer) first"
            )
        return self._engine_model

    # -- saving -----------------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The user's own model."""
        inner = model.module if isinstance(model, EngineModel) else model
        return super().unwrap_model(inner, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Whole tensors on rank 0, {} on others. With xds a collective: all ranks call it."""
        own = self._engine_model
        if own is not None and (model is own or model is own.module):
            return own.full_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate; every rank writes the engine's states to the folder `xds_engine`. A collective."""
        if self._engine_model is None:
            return super().save_state(output_dir, *args, **kwargs)
        with self._engine_apart("_save_model_state_pre_hook") as hooks:
            folder = super().save_state(output_dir, *args, **kwargs)
        for hook in hooks.values():
            hook(self._models, [], str(folder))
        self.engine.save_checkpoint(folder, ENGINE_TAG, save_latest=False)
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As in accelerate, at any number of ranks and any stage. A collective."""
        if self._engine_model is None:
            super().load_state(input_dir, *args, **kwargs)
            return
        folder = Path(input_dir).expanduser() if input_dir is not None else self._newest_state()
        if not (folder / ENGINE_TAG).is_dir():
            raise UsageError(
                f"load_state({folder}): has no folder {ENGINE_TAG}; save with save_state first"
            )
        with self._engine_apart("_load_model_state_pre_hook") as hooks:
            super().load_state(str(folder), *args, **kwargs)
        for hook in hooks.values():
            hook(self._models, str(folder))
        self.engine.load_checkpoint(folder, ENGINE_TAG)

    def _newest_state(self) -> Path:
        folder = Path(self.project_dir or ".") / "checkpoints"
        found = sorted(folder.glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[-1]))
        if not found:
            raise UsageError(f"load_state(): there is no checkpoint in {folder}; pass input_dir")
        return found[-1]

    @contextmanager
    def _engine_apart(self, hooks_name: str) -> Iterator[OrderedDict[Any, Any]]:
        """Inside, accelerate saves and loads everything except the engine; the script's hooks run later."""
        hooks: OrderedDict[Any, Any] = getattr(self, hooks_name)
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if model is not self._engine_model]
        self._optimizers = []
        setattr(self, hooks_name, OrderedDict())
        try:
            yield hooks
        finally:
            self._models, self._optimizers = models, optimizers
            setattr(self, hooks_name, hooks)

    def whole_parameters(self) -> GatheredParameters:
        """Inside, every rank holds the whole trained model; on exit rank 0's edits apply to all ranks."""
        module = self._trained("whole_parameters").module
        return GatheredParameters(module, modifier_rank=0)

    # -- ending -----------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """As in accelerate; if the engine's model is among `objects`, it is destroyed, by a collective."""
        own = self._engine_model
        if own is not None and any(obj is own for obj in objects):
            self._engine_model = None
            own.destroy()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """As in accelerate; the engine is destroyed first. A collective."""
        if self._engine_model is not None:
            self._engine_model.destroy()
            self._engine_model = None
        super().end_training()


def check_ranks(seen: int, remedy: str) -> None:
    """Raises UsageError: accelerate counts `seen` processes, but the launcher started another number."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if seen != started:
        raise UsageError(
            f"accelerate sees {seen} process{'es' if seen > 1 else ''}, but WORLD_SIZE = {started}: each "
            f"rank would train alone; use {remedy}"
        )


__all__ = ["Accelerator", "check_ranks"]
