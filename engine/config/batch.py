"""What a number of ranks means for a config: the mesh, and the three batch sizes.

train_batch_size = micro-batch x accumulation steps x data-parallel ranks, by DeepSpeed's rules: any two give
the third. train_batch_size alone, or the micro-batch alone, means no accumulation.
gradient_accumulation_steps alone is not enough. 0 means "not given".
"""

from __future__ import annotations

from typing import Any

from ...experts.config import ExpertParallel
from ...ops.mesh import Mesh
from ...pipe.config import Pipeline
from ...tensor.config import TensorParallel
from ...utils.schema.values import shown

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
COMPUTED = (TRAIN, MICRO, STEPS)
WORLD_SIZE = "world size"  # what a message calls the data-parallel ranks where all ranks are
MOST_TRIED = 1000  # sizes of shard groups, for a message
DATA_RANKS = "data-parallel ranks"  # ... and where a model has several pipeline stages


def mesh_of(pipeline: Pipeline, tensor: TensorParallel, world_size: int, sequence: int = 1) -> Mesh:
    """The mesh of `world_size` ranks. Raises ValueError with the product if it is not a whole one."""
    return Mesh.of(world_size, pipe=pipeline.stages, sequence=sequence, tensor=tensor.size)


def batch_of(config: Any, world_size: int) -> tuple[list[str], dict[str, int]]:
    """(complaints, the fields of `Config` that depend on the number of ranks)."""
    if type(world_size) is not int or world_size < 1:
        return [f"world size = {shown(world_size)}: must be a whole number, at least 1"], {}
    groups = config.num_groups
    if config.outer is not None and (found := config.outer.complaints(world_size)):
        return found, {}
    try:
        mesh = mesh_of(
            config.pipeline,
            config.tensor_parallel,
            world_size // groups,
            config.sequence_parallel_size,
        )
    except ValueError as error:
        return [str(error)], {}
    if config.elasticity.enabled:
        (train, micro, steps), complaints = config.elasticity.batch_for(mesh.data)
    else:
        (train, micro, steps), complaints = solve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            mesh.data * groups,
            auto=tuple(key for key in config.auto_keys if key in COMPUTED),
            named=WORLD_SIZE if config.model_ranks == 1 else DATA_RANKS,
        )
    data_ranks = mesh.data * groups
    complaints = [*complaints, *_wrong_micro_batches(config.pipeline, steps)]
    complaints += _wrong_shard_groups(config.zero_optimization, mesh)
    complaints += _wrong_expert_ranks(config.expert_parallel, mesh.size // mesh.pipe)
    if config.outer is None:  # else a group is a unit
        complaints += config.recovery.complaints(config.zero_optimization, mesh)
    wanted = config.data_parallel_size
    if wanted is not None and wanted != data_ranks:
        complaints.append(
            f"data_parallel_size = {wanted}: must equal the number of data-parallel ranks "
            f"({data_ranks}); remove it or start {wanted * config.model_ranks}"
        )
    sizes = dict(zip(COMPUTED, (train, micro, steps), strict=True))
    return complaints, {**sizes, "world_size": world_size, "data_parallel_ranks": data_ranks}


def _wrong_micro_batches(section: Pipeline, steps: int) -> list[str]:
    """Complaints about `steps` micro-batches in a step of the pipeline; 0: the number is not known."""
    found = []
    if steps and section.micro_batches not in (None, steps):
        found.append(
            f"pipeline.micro_batches = {section.micro_batches}: must equal {STEPS} ({steps}); remove it, and "
            f"set {STEPS} to the number of micro-batches"
        )
    least = section.least_micro_batches
    if section.stages > 1 and 0 < steps < least:
        found.append(
            f'{STEPS} = {steps}: the schedule "{section.schedule}" with pipeline.stages = {section.stages} '
            f"needs at least {least} micro-batches in a step; raise {STEPS} to {least}, or set "
            'pipeline.schedule to "gpipe"'
        )
    return found


def _wrong_shard_groups(zero: Any, mesh: Mesh) -> list[str]:
    """Complaints about data-parallel ranks that are no multiple of a shard group."""
    size, ranks = zero.mics_shard_size, mesh.data * mesh.sequence
    if size <= 0 or zero.stage == 0 or ranks % size == 0:
        return []
    named = DATA_RANKS if mesh.sequence == 1 else "data-parallel and sequence ranks"
    return [
        f"zero_optimization.mics_shard_size = {size}: must divide the number of {named} ({ranks}), so that "
        f"every shard group has as many ranks; set it to {_divisors(ranks)}, or start a multiple of {size}"
    ]


def _wrong_expert_ranks(section: ExpertParallel, ranks: int) -> list[str]:
    """Complaints about `ranks` ranks of a pipeline stage that are no multiple of those that share experts."""
    if ranks % section.num_ranks == 0:
        return []
    return [
        f"{section.setting}: must divide the data, sequence and tensor ranks of a pipeline stage ({ranks}); "
        f"set it to {_divisors(ranks)}, to 0 for as many as fit, or start a multiple of {section.num_ranks}"
    ]


def _divisors(number: int) -> str:
    found = [str(part) for part in range(1, min(number, MOST_TRIED) + 1) if number % part == 0]
    return " or ".join(found[:8])


def solve_batch(
    train: int,
    micro: int,
    steps: int,
    ranks: int,
    auto: tuple[str, ...] = (),
    named: str = WORLD_SIZE,
) -> tuple[tuple[int, int, int], list[str]]:
    """((train, micro, steps), complaints). Sizes are in samples, and complete if there is no complaint.

    `auto`: the keys whose value is "auto", for the message; `named`: what it calls the data-parallel `ranks`.

    >>> solve_batch(32, 4, 0, 2)
    ((32, 4, 4), [])
    """
    if not train and not micro:
        alone = f" ({STEPS} = {steps} alone is not enough)" if steps else ""
        if auto:
            alone += f' ("auto" for {" and ".join(auto)} cannot be computed)'
        return (train, micro, steps), [
            f"{TRAIN}: no batch size is given{alone}; write {TRAIN} "
            f"(samples per step over all ranks) or {MICRO} (samples per rank and forward)"
        ]
    if train and micro and steps:
        product = micro * steps * ranks
        wrong = (
            f"{TRAIN} = {train}: must equal {MICRO} ({micro}) x {STEPS} ({steps}) x {named} "
            f"({ranks}) = {product}; remove one of the three keys or set {TRAIN} to {product}"
        )
        return (train, micro, steps), [] if train == product else [wrong]
    if not train:
        steps = steps or 1
        return (micro * steps * ranks, micro, steps), []
    chunk = (micro or steps or 1) * ranks
    if train % chunk == 0:
        found = train // chunk
        return ((train, micro, found) if micro else (train, found, steps or 1)), []
    below = train // chunk * chunk
    near = f"{below} or {below + chunk}" if below else str(chunk)
    factor, more = f"the {named} ({ranks})", ""
    if micro:
        factor, more = f"{MICRO} ({micro}) x {named} ({ranks}) = {chunk}", f"{MICRO} or "
    elif steps:
        factor = f"{STEPS} ({steps}) x {named} ({ranks}) = {chunk}"
    return (train, micro, 0 if micro else steps or 1), [
        f"{TRAIN} = {train}: must be a multiple of {factor}; set {TRAIN} to {near}, or change {more}"
        "the number of ranks"
    ]
