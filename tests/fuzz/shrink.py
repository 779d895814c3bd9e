"""Makes a failing case smaller while it fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .runner import Job, Runner, Verdict

SIMPLER: tuple[tuple[str, Any], ...] = (
    *(
        ("world_size", 1),
        ("world_size", 2),
        ("accumulation", 1),
        ("num_steps", 1),
        ("num_steps", 2),
    ),
    *(("clipping", 0.0), ("weight_decay", 0.0), ("optimizer", "SGD without momentum")),
    *(("precision", "fp32"), ("stage", 0), ("stage", 1), ("stage", 2), ("overlap_comm", True)),
    *(("unit_min_numel", 0), ("stage3_param_persistence_threshold", 0)),
    *(("stage3_prefetch_bucket_size", 50_000_000), ("stage3_max_reuse_distance", 50_000_000)),
    *(("stage3_max_live_parameters", 1_000_000_000), ("divergent_graphs", False)),
)


def shrink(runner: Runner, verdict: Verdict) -> Verdict:
    """The smallest case that was found; its outcome is that of `verdict`."""
    found = [verdict]
    for job in _smaller(found):
        tried = runner.run(job)
        if tried.outcome == verdict.outcome:
            found.append(tried)
    return found[-1]


def _smaller(found: list[Verdict]) -> Iterator[Job]:
    """One change after another to the last that was `found`, which grows meanwhile."""
    for name in found[-1].job.case().names:
        yield replace(found[-1].job, drop=(*found[-1].job.drop, name))
    for key, value in SIMPLER:
        case = found[-1].job.case()
        now = case.zero.get(key) if key in case.zero else getattr(case, key, None)
        if now != value and not (key in ("stage", "world_size") and now < value):
            others = tuple(change for change in found[-1].job.changes if change[0] != key)
            yield replace(found[-1].job, changes=(*others, (key, value)))
