"""`Trainer` of transformers on an engine: two changed lines in a script.

    from xds.engine.integrations.huggingface import Trainer, TrainingArguments
    args = TrainingArguments(..., xds_config="zero3.json")

It overrides methods that transformers intends to be overridden, and patches nothing. Without `xds_config` it
behaves like that Trainer. See docs/design/huggingface.md.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...utils.errors import UsageError
from ..config.config import Config
from ..optim.schedules import build_scheduler
from .given import Given, Source, hidden_size_of, sized_by
from .optional import need
from .trainer_values import argument_values, schedule_values

need("transformers", "xds.engine.integrations.huggingface", "huggingface")
need("accelerate", "xds.engine.integrations.huggingface", "huggingface")

import transformers  # noqa: E402 (only where it is installed)
from accelerate.utils.deepspeed import DummyOptim  # noqa: E402

from .accelerate import ENGINE_TAG, Accelerator, check_ranks  # noqa: E402

if TYPE_CHECKING:
    _AnyTrainer = Any  # the mixin's base is the Trainer that follows it
else:
    _AnyTrainer = object

SCHEDULER_FILE = "scheduler.pt"  # transformers' own name
# HfArgumentParser supports only text; a script can also pass a dict
HELP = {"help": "the JSON config of xds: a path, or JSON text"}
ON_CPUS = "TrainingArguments(use_cpu=True) on CPUs"


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """TrainingArguments with the config of xds, which HfArgumentParser reads from --xds_config."""

    xds_config: str | None = field(default=None, metadata=HELP)

    def __post_init__(self) -> None:
        _use_cpu_without_gpu(self)
        super().__post_init__()


@dataclass
class Seq2SeqTrainingArguments(transformers.Seq2SeqTrainingArguments):
    """As `TrainingArguments`."""

    xds_config: str | None = field(default=None, metadata=HELP)

    def __post_init__(self) -> None:
        _use_cpu_without_gpu(self)
        super().__post_init__()


def _use_cpu_without_gpu(args: Any) -> None:
    if args.xds_config is not None and not torch.cuda.is_available():
        args.use_cpu = True  # otherwise transformers counts one process


class TrainerMixin(_AnyTrainer):
    """Makes a Trainer train with xds; list it before any subclass of transformers.Trainer:

    class MyTrainer(TrainerMixin, SFTTrainer): ...
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, xds_config: Any = None, **kwargs: Any) -> None:
        """
        Args:
            xds_config: a path, JSON text or a dict, instead of TrainingArguments.xds_config.
        Raises:
            ConfigError: the config is wrong, or contradicts TrainingArguments; every complaint at once.
            UsageError: an argument is not supported with xds.
        """
        self._xds_config = xds_config
        self._source: Source | None = None
        super().__init__(*args, **kwargs)

    # -- building ---------------------------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        """The engine, or None before training."""
        return self.accelerator.engine if self._source is not None else None

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if self._source is not None:
            found["mixed_precision"] = "no"  # the engine handles precision: no autocast around it
            self._accelerator_args = {k: v for k, v in found.items() if v is not None}
        return found

    def create_accelerator_and_postprocess(self) -> None:
        given = self._xds_config, getattr(self.args, "xds_config", None)
        if all(one is not None for one in given):
            raise UsageError(
                "xds_config is given to the Trainer and in TrainingArguments: keep one of them"
            )
        config = given[0] if given[0] is not None else given[1]
        if config is None:
            super().create_accelerator_and_postprocess()
            return
        self._source = Source(config)
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(**self._accelerator_args, xds_config=config)
        gather = self.accelerator.gather_for_metrics
        if "use_gather_object" in inspect.signature(gather).parameters:
            gather = partial(gather, use_gather_object=self.args.eval_use_gather_object)
        self.gather_function = gather
        self._fill(None, logs=False)

    def _fill(self, num_training_steps: int | None, *, logs: bool) -> Config:
        """The config with the current arguments, which a hyperparameter search may have changed."""
        assert self._source is not None
        values: dict[str, Given] = {
            **argument_values(self._source, self.args),
            **sized_by(hidden_size_of(self.model)),
        }
        if self._source.has_section("scheduler"):
            values |= schedule_values(self.args, num_training_steps)
        return self._source.filled(values, logs=logs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._source is None:  # otherwise the engine moves it, in parts if it is sharded
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The config's optimizer with the Trainer's parameter groups, if it names one; else the Trainer's."""
        if self._source is None or not self._source.has_section("optimizer"):
            return super().create_optimizer(model)
        if self.optimizer is None:
            self.optimizer = DummyOptim(self._groups(self.model if model is None else model))
        elif self.engine is None:
            raise UsageError(
                "the config has a section optimizer, and the Trainer got optimizers=...: remove one of the two"
            )
        return self.optimizer

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups: no weight decay for biases and norms, as in every Trainer."""
        decays = set(self.get_decay_parameter_names(model))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for name, p in trained if (name in decays) is with_decay],
                "weight_decay": self.args.weight_decay if with_decay else 0.0,
            }
            for with_decay in (True, False)
        ]
        return [group for group in groups if group["params"]]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The config's schedule over `num_training_steps`, if it names one; else the Trainer's."""
        if self._source is None or not self._source.has_section("scheduler"):
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is not None:
            raise UsageError(
                "the config has a section scheduler, and the Trainer got a scheduler in optimizers=...: remove "
                "one of the two"
            )
        section = self._fill(num_training_steps, logs=False).scheduler
        assert section is not None
        self.lr_scheduler = build_scheduler(section, optimizer or self.optimizer)
        self._created_lr_scheduler = True  # the Trainer creates a new one for each train()
        return self.lr_scheduler

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if self._source is not None and self.engine is None:
            self.accelerator.use_config(self._fill(max_steps, logs=True))
        elif self._source is not None and self.model_wrapped is self.model:
            self._start_over(max_steps)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _start_over(self, max_steps: int | None) -> None:
        """model_init created another model: destroy the engine of the previous one."""
        self.accelerator.free_memory(self.accelerator.trained_model)
        self.accelerator.use_config(self._fill(max_steps, logs=False))

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if self._source is None:
            return super()._wrap_model(model, training, dataloader)
        own = self.accelerator.trained_model
        return own if own is not None and own.module is model else model

    # -- evaluation -------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. At stage 3 a model that was not trained yet is sharded first."""
        if self._source is not None and self.engine is None and self.args.world_size > 1:
            config = self._fill(None, logs=False)
            if config.zero_optimization.stage == 3:
                self.accelerator.use_config(config)
                self.create_optimizer()
                self.model_wrapped, self.optimizer = self.accelerator.prepare(
                    self.model, self.optimizer
                )
        return super().evaluation_loop(*args, **kwargs)

    # -- saving and resuming ----------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write whole weights for from_pretrained; only the adapter of a PEFT model. A collective."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        model = self.accelerator.trained_model
        state = model.full_state_dict(rank0_only=not self.args.save_on_each_node)
        self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.engine.save_checkpoint(output_dir, ENGINE_TAG, save_latest=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._source is None or not _has_engine_states(resume_from_checkpoint):
            self._with_whole(super()._load_from_checkpoint, resume_from_checkpoint, model)
        # otherwise the engine loads everything after it is built

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.engine is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None and _has_engine_states(checkpoint):
            self.engine.load_checkpoint(checkpoint, ENGINE_TAG)
            path = os.path.join(checkpoint, SCHEDULER_FILE)
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.engine is not None and _has_engine_states(best):
            self.engine.load_checkpoint(best, ENGINE_TAG, load_module_only=True)
        else:
            self._with_whole(super()._load_best_model)

    def _with_whole(self, load: Any, *args: Any) -> None:
        """Call `load`, which writes into the model, with the model whole on every rank."""
        if self.engine is None:
            load(*args)
            return
        with self.accelerator.whole_parameters():
            load(*args)


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers.Trainer on an engine."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer on an engine, with predict_with_generate."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; at stage 3 ranks generate until the last one is done."""
        if self.engine is not None and self.engine.zero_optimization_stage() == 3:
            kwargs.setdefault("synced_gpus", self.args.world_size > 1)
            kwargs = {**getattr(self, "_gen_kwargs", {}), **kwargs}
        return super().prediction_step(*args, **kwargs)


def _has_engine_states(folder: str | None) -> bool:
    return folder is not None and (Path(folder) / ENGINE_TAG).is_dir()


def _check_arguments(args: Any) -> None:
    """Check TrainingArguments before anything is built.

    Raises:
        UsageError: an argument is not supported with xds.
    """
    refused = {
        "deepspeed": "a second backend; pass its JSON as xds_config",
        "fsdp": "a second backend; zero_optimization.stage = 3 shards the same states",
        "auto_find_batch_size": "after an out-of-memory error on one rank the others would wait for it "
        "forever; set per_device_train_batch_size",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise UsageError(
                f"TrainingArguments.{name} = {getattr(args, name)!r} with xds_config: {why}"
            )
    if args.n_gpu > 1:
        raise UsageError(
            f"one process sees {args.n_gpu} GPUs: start one process for each, with `xds script.py`"
        )
    check_ranks(args.world_size, ON_CPUS)


__all__ = [
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
]
