"""What an unknown key of a config may mean: its right place, another name, or nothing that is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from ...utils.quoting import printable
from ...utils.schema.keys import joined
from ...utils.schema.section import Section, known_names, subsection
from .optimizer import OPTIMIZERS
from .scheduler import SCHEDULERS

OTHER_NAMES = {
    **dict.fromkeys(
        (
            *("max_grad_norm", "max_norm", "clip_grad", "clip_grad_norm", "grad_clip"),
            *("gradient_clip", "gradient_clip_val", "grad_clipping"),
        ),
        "gradient_clipping",
    ),
    **dict.fromkeys(
        (
            *("micro_batch_size", "train_micro_batch_size", "micro_batch_size_per_gpu"),
            *("per_device_train_batch_size", "train_micro_batch_size_per_device"),
        ),
        "train_micro_batch_size_per_gpu",
    ),
    **dict.fromkeys(("batch_size", "global_batch_size"), "train_batch_size"),
    **dict.fromkeys(
        ("accumulation_steps", "grad_accum_steps", "accumulate_grad_batches", "grad_acc_steps"),
        "gradient_accumulation_steps",
    ),
    **dict.fromkeys(("zero", "zero_optim"), "zero_optimization"),
    **dict.fromkeys(("zero_stage", "stage_zero"), "zero_optimization.stage"),
    "learning_rate": "optimizer.params.lr",
    **dict.fromkeys(("adam_epsilon", "epsilon"), "optimizer.params.eps"),
    **dict.fromkeys(("wd", "decay"), "optimizer.params.weight_decay"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), "scheduler.params.warmup_num_steps"),
    **dict.fromkeys(
        ("num_training_steps", "total_steps", "max_steps"), "scheduler.params.total_num_steps"
    ),
    **dict.fromkeys(("optim", "optimizers"), "optimizer"),
    **dict.fromkeys(("lr_scheduler", "schedule", "schedulers"), "scheduler"),
    **dict.fromkeys(("float16", "half"), "fp16"),
    "torch_amp": "torch_autocast",
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpoint", "activation_recomputation"),
        "activation_checkpointing",
    ),
    "fp32_allreduce": "communication_data_type",
    "sequence_parallel": "sequence_parallel_size",
    "tensor_parallel_size": "tensor_parallel.tp_size",
    "pipeline_stages": "pipeline.stages",
}
# a name in one of these sections means the same wherever it is written
CLEAR_SECTIONS = (
    *("", "zero_optimization", "fp16", "activation_checkpointing"),
    *("optimizer.params", "scheduler.params"),
)
GENERAL = {  # too general to tell a section
    *("backend", "classes", "device", "dtype", "enabled", "mode", "names", "params", "profile"),
    *("ratio", "type", "units"),
}
_OF_LOSS_SCALE = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
    "consecutive_hysteresis",
)
_NO_SCALE = "bf16 has the range of fp32, so it has no loss scale: remove it"


@final
class Meanings:
    """Answers `Report.meant` for a config of the class `model`."""

    def __init__(self, model: type[Section]) -> None:
        self._sections: dict[str, set[str]] = {}  # name -> the sections that have it
        for section, name in _all_names(model, ""):
            self._sections.setdefault(name, set()).add(section)

    def __call__(self, section: str, key: str, names: list[str]) -> str | None:
        """What `key` may mean in `section`, which has `names`; None if nothing is known about it."""
        if "." in key:
            return self._nested(key)
        if section == "bf16" and key in _OF_LOSS_SCALE:
            return _NO_SCALE
        return self._other_name(section, key, names) or self._other_place(section, key)

    def _nested(self, key: str) -> str:
        *parts, last = printable(key).split(".")
        opened = "".join(f'"{part}": {{' for part in parts)
        text = f'{opened}"{last}": ...{"}" * len(parts)}'
        return f"keys are nested, not joined by dots: write {text}"

    def _other_name(self, section: str, key: str, names: list[str]) -> str | None:
        known = OTHER_NAMES.get(key.casefold())
        if known is None:
            return None
        outer, _, name = known.rpartition(".")
        if outer == section:
            return f'did you mean "{name}"?' if name in names else None
        is_near = not section or outer.startswith(f"{section}.")
        return f'did you mean "{known}"?' if is_near else None

    def _other_place(self, section: str, key: str) -> str | None:
        places = sorted(self._sections.get(key, ()))
        found = [each for each in places if section and each.startswith(f"{section}.")]
        if not found and key not in GENERAL:
            found = [each for each in places if each in CLEAR_SECTIONS and each != section]
            found = found if len(found) == 1 else []
        if not found:
            return None
        listed = " or ".join(f'"{joined(each, key)}"' for each in found)
        return f"it belongs to {listed}"


def _all_names(model: type[Section], path: str) -> Iterator[tuple[str, str]]:
    """(section, name) of all keys in the model, its subsections, and the arguments of known classes."""
    for name in known_names(model):
        yield path, name
    for name in model.model_fields:
        inner = subsection(model, name)
        if inner is not None:
            yield from _all_names(inner, joined(path, name))
    for classes in (OPTIMIZERS, SCHEDULERS):
        if path == classes.section:
            for table in classes.built_in.values():
                yield from ((f"{path}.params", name) for name in table)


__all__ = ["Meanings"]
