"""The value "auto": filled by an integration, computed, or refused.

1. `Config.load(source, auto={"optimizer.params.lr": 1e-4})` fills keys whose value is "auto".
2. The batch sizes are computed from one another and the world size.
3. `gradient_clipping` becomes 1.0, the value that Trainer and Accelerate fill in by default.
4. "auto" is an error for keys that only the training script can know (`MUST_BE_FILLED`).
5. Where a key's rule takes it, it is a value of its own.
6. For all other keys it means the default of xds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ...utils.schema.keys import AUTO, Report, joined, plain

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
CLIPPING_OF_INTEGRATIONS = 1.0
COMPUTED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def fill_auto(
    data: dict[str, Any],
    given: Mapping[str, Any],
    canonical: Callable[[str], str],
    report: Report,
) -> dict[str, Any]:
    """`data` (changed in place) with each "auto" filled, computed or reported as an error.

    `canonical` maps a key path to its canonical spelling, which is looked up in `given`.
    """
    values = {canonical(path): value for path, value in given.items()}

    def walk(section: dict[str, Any], path: str) -> None:
        for key, value in list(section.items()):
            here = joined(path, key)
            if isinstance(value, dict):
                walk(value, here)
            elif isinstance(value, str) and value.casefold() == AUTO:
                fill(section, key, here, canonical(here))

    def fill(section: dict[str, Any], key: str, here: str, name: str) -> None:
        if name in values:
            section[key] = plain(values[name])
            return
        if name == OWN_VALUE:
            return
        if name == "gradient_clipping":
            section[key] = CLIPPING_OF_INTEGRATIONS
            report.notes.append(
                'gradient_clipping = "auto": 1.0 is used, as Trainer and Accelerate fill it in'
            )
            return
        wanted = [text for glob, text in MUST_BE_FILLED.items() if fnmatchcase(name, glob)]
        if wanted:
            report.complain(
                here, AUTO, f"only an integration such as a Trainer can fill it; write {wanted[0]}"
            )

    walk(data, "")
    return data


def note_auto(report: Report, shown_default: Callable[[str], str]) -> None:
    """Add a note for each "auto" that means the default."""
    for path in report.auto_keys:
        default = shown_default(path)
        if path not in COMPUTED and default != '"auto"':
            report.notes.append(f'{path} = "auto": the default is used, {default}')
