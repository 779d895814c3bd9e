"""The value "auto": filled by an integration, computed, or refused.

1. `Config.load(source, auto={"optimizer.params.lr": 1e-4})` fills keys whose value is "auto", and the batch
   sizes where the file gives none.
2. The batch sizes are computed from one another and the world size.
3. `gradient_clipping` becomes 1.0, the value that Trainer and Accelerate fill in by default.
4. "auto" is an error for keys that only the training script can know (`MUST_BE_FILLED`).
5. Where a key's rule takes it, it is a value of its own.
6. For all other keys it means the default of xds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ...utils.arguments import wrong
from ...utils.schema.section import AUTO, Report, is_auto, is_comment, joined, plain
from ...utils.schema.values import FLAG, shown
from .batch import COMPUTED, MICRO, STEPS, TRAIN
from .optimizer import OPTIMIZERS
from .scheduler import SCHEDULERS

MUST_BE_FILLED: dict[str, str] = {
    "optimizer.type": "a name such as AdamW",
    "optimizer.params.betas": "a list of two numbers",
    "optimizer.params.*": "a number",
    "scheduler.type": "a name such as WarmupLR",
    "scheduler.params.warmup_type": "log or linear",
    "scheduler.params.*": "a number",
    "fp16.enabled": "true or false",
    "bf16.enabled": "true or false",
    "amp.enabled": "true or false",
    "torch_autocast.enabled": "true or false",
    "zero_optimization.stage": "0, 1, 2 or 3",
    "zero_optimization.offload_param.device": "none, cpu or nvme",
    "zero_optimization.offload_optimizer.device": "none, cpu or nvme",
}
OWN_VALUE = "optimizer.params.freeze_step"  # "auto" is a value of its own there
CLIPPING, CLIPPING_OF_INTEGRATIONS = "gradient_clipping", 1.0
_ACCELERATOR = (  # what accelerate's plugin or its DummyOptim and DummyScheduler know
    *("optimizer.params.lr", "optimizer.params.weight_decay", "scheduler.params.warmup_*_lr"),
    *("scheduler.params.*_num_steps", "fp16.enabled", "bf16.enabled", "zero_optimization.stage"),
    "zero_optimization.offload_*.device",
)
_TRAINER: dict[str, Any] = {  # what TrainingArguments of transformers know, with their defaults
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": (0.9, 0.999),
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 1000,  # an example: it depends on the data
    "fp16.enabled": False,
    "bf16.enabled": False,
    "torch_autocast.enabled": False,
}
_TRAINER_BATCH = {MICRO: 8, STEPS: 1}


def fill_auto(
    data: dict[str, Any],
    given: Mapping[str, Any],
    canonical: Callable[[str], str],
    report: Report,
) -> dict[str, Any]:
    """`data` (changed in place) with each "auto" filled, computed or reported as an error.

    `canonical` maps a key path to its canonical spelling, which is looked up in `given`.
    Raises UsageError: `given` is no mapping with text for keys.
    """
    if not isinstance(given, Mapping) or not all(isinstance(path, str) for path in given):
        raise wrong(
            "auto", given, 'a dict of values by path, such as {"optimizer.params.lr": 1e-4}'
        )
    values = {canonical(path): value for path, value in given.items()}
    for section, key, here in list(_each_auto(data, "")):
        name = canonical(here)
        if name in values and not is_auto(values[name]):
            section[key] = plain(values[name])
        elif name == CLIPPING:
            section[key] = CLIPPING_OF_INTEGRATIONS
            report.auto_keys.append(name)
            report.notes.append(
                'gradient_clipping = "auto": 1.0 is used, as Trainer and Accelerate fill it in'
            )
        elif name != OWN_VALUE:
            _refuse(here, name, _wanted(name, data), report)
    _fill_batch(data, values)
    return data


def trainer_values(data: Mapping[str, Any], canonical: Callable[[str], str]) -> dict[str, Any]:
    """What a Trainer with default arguments fills in for each "auto" of `data`, by canonical path.

    Batch sizes are among them if all that the file has are "auto".
    """
    names = [canonical(here) for _, _, here in _each_auto(data, "")]
    found = {name: _TRAINER[name] for name in names if name in _TRAINER}
    if _is_batch_open(data) and any(name in COMPUTED for name in names):
        found.update({key: size for key, size in _TRAINER_BATCH.items() if _is_open(data, key)})
    return found


def _each_auto(section: Any, path: str) -> Iterator[tuple[Any, str, str]]:
    """(section, key, path) of each "auto" in the section and below it."""
    for key, value in section.items():
        here = joined(path, key)
        if is_comment(key):
            continue
        if isinstance(value, dict):
            yield from _each_auto(value, here)
        elif is_auto(value):
            yield section, key, here


def _wanted(name: str, data: Mapping[str, Any]) -> str:
    """What to write for an "auto" that only the training script can know; "" for other and unknown keys."""
    wanted = next((text for glob, text in MUST_BE_FILLED.items() if fnmatchcase(name, glob)), "")
    for classes in (OPTIMIZERS, SCHEDULERS):
        if name.startswith(f"{classes.section}.params."):
            section = data.get(classes.section)
            kind = section.get("type") if isinstance(section, dict) else None
            entry = classes.argument(kind, name.removeprefix(f"{classes.section}.params."))
            if entry is None:
                return ""
            return FLAG.need if entry.need == FLAG.need else wanted
    return wanted


def _refuse(here: str, name: str, wanted: str, report: Report) -> None:
    """Report an "auto" for which the script has to write something."""
    if wanted:
        report.complain(
            here,
            AUTO,
            f"only an integration can fill it{_integrations(name)}; write {wanted}, or try a value with "
            f"`xds check --auto {here}=VALUE`",
        )


def _integrations(name: str) -> str:
    """The integrations that know the value of this key, for a message."""
    known = {"Trainer of transformers": _TRAINER, "Accelerator of accelerate": _ACCELERATOR}
    found = [who for who, globs in known.items() if any(fnmatchcase(name, glob) for glob in globs)]
    return f" ({' or '.join(found)})" if found else ""


def _fill_batch(data: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Batch sizes that an integration knows, where the file has none, as Trainer adds them."""
    if _is_batch_open(data):
        first = MICRO if MICRO in values else TRAIN
        known = [key for key in (first, STEPS) if key in values and _is_open(data, key)]
        data.update({key: plain(values[key]) for key in known})


def _is_batch_open(data: Mapping[str, Any]) -> bool:
    """Nothing in the file gives a batch size."""
    elastic = data.get("elasticity")
    is_elastic = isinstance(elastic, dict) and elastic.get("enabled") is True
    return not is_elastic and _is_open(data, TRAIN) and _is_open(data, MICRO)


def _is_open(data: Mapping[str, Any], key: str) -> bool:
    return data.get(key) is None or is_auto(data.get(key))


def unfilled(config: Any, canonical: Callable[[str], str]) -> dict[str, Any]:
    """The value of each key whose "auto" nothing has filled, by path: the default, or what xds takes."""
    found = {}
    for path in config.auto_keys:
        value = config
        for part in canonical(path).split("."):
            value = getattr(value, part, None)
        if path not in COMPUTED and value != AUTO:
            found[path] = value
    return found


def note_auto(report: Report, config: Any, canonical: Callable[[str], str]) -> None:
    """Add a note for each "auto" that means the default."""
    for path, default in unfilled(config, canonical).items():
        if path != CLIPPING:
            report.notes.append(f'{path} = "auto": the default is used, {shown(default)}')
