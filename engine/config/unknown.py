"""What an unknown key of a config may mean: its right place, another name, or nothing that is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import final

from ...utils.quoting import printable
from ...utils.schema.section import Report, Section, joined, known_names, nearest, subsection
from .optimizer import OPTIMIZERS
from .scheduler import SCHEDULERS

_NAMES_FOR = {
    "gradient_clipping": "max_grad_norm max_norm clip_grad clip_grad_norm grad_clip gradient_clip "
    "gradient_clip_val grad_clipping",
    "train_micro_batch_size_per_gpu": "micro_batch_size train_micro_batch_size micro_batch_size_per_gpu "
    "per_device_train_batch_size train_micro_batch_size_per_device",
    "train_batch_size": "batch_size global_batch_size",
    "gradient_accumulation_steps": "accumulation_steps grad_accum_steps accumulate_grad_batches grad_acc_steps",
    "zero_optimization": "zero zero_optim",
    "zero_optimization.stage": "zero_stage stage_zero",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon epsilon",
    "optimizer.params.weight_decay": "wd decay",
    "scheduler.params.warmup_num_steps": "warmup_steps num_warmup_steps",
    "scheduler.params.total_num_steps": "num_training_steps total_steps max_steps",
    "optimizer": "optim optimizers",
    "scheduler": "lr_scheduler schedule schedulers",
    "fp16": "float16 half",
    "torch_autocast": "torch_amp",
    "activation_checkpointing": "gradient_checkpointing activation_checkpoint activation_recomputation",
    "communication_data_type": "fp32_allreduce",
    "sequence_parallel_size": "sequence_parallel",
    "tensor_parallel.tp_size": "tensor_parallel_size",
    "pipeline.stages": "pipeline_stages",
}
OTHER_NAMES = {each: name for name, names in _NAMES_FOR.items() for each in names.split()}
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


@final
@dataclass(kw_only=True)
class ConfigReport(Report):
    """The findings of reading a whole config of the class `model`, whose keys it knows."""

    model: type[Section]

    def hint(self, section: str, key: str, names: list[str]) -> str:
        """What an unknown key of a section with the keys `names` may mean."""
        if "." in key and (key.partition(".")[0] in names or not nearest(key, names)):
            *parts, last = printable(key).split(".")
            opened = "".join(f'"{part}": {{' for part in parts)
            return f'keys are nested, not joined by dots: write {opened}"{last}": ...{"}" * len(parts)}'
        if section == "bf16" and key in _OF_LOSS_SCALE:
            return "bf16 has the range of fp32, so it has no loss scale: remove it"
        found = _other_name(section, key, names) or self._other_place(section, key)
        return found or super().hint(section, key, names)

    def _other_place(self, section: str, key: str) -> str:
        places = sorted(_places(self.model).get(key, ()))
        found = [each for each in places if section and each.startswith(f"{section}.")]
        if not found and key not in GENERAL:
            found = [each for each in places if each in CLEAR_SECTIONS and each != section]
            found = found if len(found) == 1 else []
        listed = " or ".join(f'"{joined(each, key)}"' for each in found)
        return f"it belongs to {listed}" if listed else ""


def _other_name(section: str, key: str, names: list[str]) -> str:
    known = OTHER_NAMES.get(key.casefold(), "")
    outer, _, name = known.rpartition(".")
    if known and outer == section:
        return f'did you mean "{name}"?' if name in names else ""
    is_near = not section or outer.startswith(f"{section}.")
    return f'did you mean "{known}"?' if known and is_near else ""


@cache
def _places(model: type[Section]) -> dict[str, set[str]]:
    """name -> the sections that have a key of this name."""
    found: dict[str, set[str]] = {}
    for section, name in _all_names(model, ""):
        found.setdefault(name, set()).add(section)
    return found


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


__all__ = ["ConfigReport"]
