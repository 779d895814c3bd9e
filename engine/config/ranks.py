"""What a number of ranks means for a config: the mesh, and which settings allow several pipeline stages."""

from __future__ import annotations

from ...ops.mesh import Mesh
from ...pipe.config import Pipeline, check_pipeline
from ...tensor.config import TensorParallel
from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig
from .batch import STEPS
from .elasticity import Elasticity
from .optimizer import WHOLE_TENSOR

_ONE_UPDATE = (
    "pipeline stages run all micro-batches of an update in one call of train_batch, so the engine counts them; "
    "set it to true, or pipeline.stages to 1"
)
_ONE_GRAPH = (
    "pipeline stages have a fixed order of layers, which the ranks of a stage share; set it to false, or "
    "pipeline.stages to 1"
)


def mesh_of(pipeline: Pipeline, tensor: TensorParallel, world_size: int, sequence: int = 1) -> Mesh:
    """The mesh of `world_size` ranks. Raises ValueError with the product if it is not a whole one."""
    return Mesh.of(world_size, pipe=pipeline.stages, sequence=sequence, tensor=tensor.size)


def check_stages(
    section: Pipeline,
    elasticity: Elasticity,
    zero: ZeroConfig,
    report: Report,
    *,
    counts_micro_batches: bool,
    recomputes: bool,
    tensor_ranks: int = 1,
    sequence_ranks: int = 1,
) -> None:
    """Report what the section pipeline does not allow, in itself and in other sections.

    recomputes: whether the section activation_checkpointing is enabled.
    """
    check_pipeline(section, report)
    stages = section.stages
    if (
        elasticity.enabled
        and elasticity.model_parallel_size != stages * tensor_ranks * sequence_ranks
    ):
        factor = f" x tensor_parallel.tp_size ({tensor_ranks})" if tensor_ranks > 1 else ""
        factor += f" x sequence_parallel_size ({sequence_ranks})" if sequence_ranks > 1 else ""
        report.complain(
            "elasticity.model_parallel_size",
            elasticity.model_parallel_size,
            f"must equal pipeline.stages ({stages}){factor}, the number of ranks that hold one model; set both "
            "to the same number (`xds elastic` plans with any)",
        )
    if stages == 1:
        return
    if not counts_micro_batches:
        report.complain("managed_gradient_accumulation", False, _ONE_UPDATE)
    if recomputes and section.activation_checkpoint_interval:
        report.complain(
            "pipeline.activation_checkpoint_interval",
            section.activation_checkpoint_interval,
            "the section activation_checkpointing recomputes every block already; remove one of the two",
        )
    if zero.divergent_graphs:
        report.complain("zero_optimization.divergent_graphs", True, _ONE_GRAPH)


def check_slices(section: TensorParallel, optimizer: str | None, report: Report) -> None:
    """Report settings that do not work with slices of tensors. `optimizer`: the type, if there is one."""
    if section.size == 1:
        return
    if optimizer in (*WHOLE_TENSOR, "Adafactor"):
        report.complain(
            "optimizer.type",
            optimizer,
            f"it uses norms or products of whole tensors, and tensor_parallel.tp_size = {section.size} cuts "
            "them; choose an optimizer such as AdamW, or set tensor_parallel.tp_size to 1",
        )


def check_sequence_ranks(size: int, *, cuts: bool, stages: int, report: Report) -> None:
    """Report settings that do not work with `size` sequence ranks. `cuts`: the engine cuts the batches."""
    if size == 1:
        return
    if stages > 1 and not cuts:
        report.complain(
            "sequence.cut_by",
            "script",
            f'all of pipeline.stages = {stages} read the whole batch; set it to "engine", or the stages to 1',
        )


def check_micro_batches(section: Pipeline, steps: int) -> list[str]:
    """Complaints about `steps` micro-batches in a step of the pipeline; 0: the number is not known."""
    if not steps:
        return []
    found = []
    if section.micro_batches is not None and section.micro_batches != steps:
        found.append(
            f"pipeline.micro_batches = {section.micro_batches}: must equal {STEPS} ({steps}); remove it, and "
            f"set {STEPS} to the number of micro-batches"
        )
    least = section.least_micro_batches
    if section.stages > 1 and steps < least:
        found.append(
            f'{STEPS} = {steps}: the schedule "{section.schedule}" with pipeline.stages = {section.stages} '
            f"needs at least {least} micro-batches in a step; raise {STEPS} to {least}, or set "
            'pipeline.schedule to "gpipe"'
        )
    return found
