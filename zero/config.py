"""The section zero_optimization: which model states are sharded, in which units and buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, final

from pydantic import Field

from ..compression import config as compression
from ..offload import config as offload
from ..utils.schema.section import Entry, NoEffect, Refused, Section, nested
from ..utils.schema.values import WHOLE, Elements, Flag, Names, Natural, SomeElements, needs

STAGES = {
    0: "nothing is sharded; gradients are averaged over the ranks",
    1: "the optimizer state is sharded over the ranks",
    2: "the optimizer state and the gradients are sharded over the ranks",
    3: "the optimizer state, the gradients and the parameters are sharded over the ranks",
}

_FLAT = "parameters and gradients are always views of flat buffers"
_FETCH = "units are always gathered in place into flat buffers"
_SAVE = "a save of full weights always gathers them"


def _always(why: str) -> NoEffect:
    return NoEffect(Flag, why, same=(True,))


def _never(why: str) -> NoEffect:
    return NoEffect(Flag, why, same=(False,))


_OTHERS: dict[str, Entry] = {
    "allgather_partitions": _always("shards are always gathered by all_gather"),
    "reduce_scatter": _always("gradients of stages 1 to 3 are always reduce-scattered"),
    "use_multi_rank_bucket_allreduce": _always("gradients are reduce-scattered, not all-reduced"),
    "contiguous_gradients": _always(_FLAT),
    "round_robin_gradients": _never("every rank has an equal shard of every unit"),
    "parameter_alignment": NoEffect(Flag, "parameters are always aligned in their flat buffer"),
    "load_from_fp32_weights": _always("load_checkpoint reads the fp32 masters"),
    "elastic_checkpoint": _never("checkpoints load at any number of ranks without it"),
    "ignore_unused_parameters": _always("parameters without a gradient contribute zeros"),
    "reduce_bucket_size": NoEffect(
        SomeElements, "the gradients of a unit are reduced in one call; see units"
    ),
    "allgather_bucket_size": NoEffect(SomeElements, "a unit is gathered in one call; see units"),
    "sub_group_size": NoEffect(Elements, "the update runs unit by unit"),
    "model_persistence_threshold": NoEffect(
        Elements, "only param_persistence_threshold decides what stays gathered"
    ),
    "module_granularity_threshold": NoEffect(
        Elements, "unit_min_numel sets the minimum size of a unit", same=(0,)
    ),
    "use_all_reduce_for_fetch_params": _never(_FETCH),
    "allgather_sequential": _never(_FETCH),
    "memory_efficient_linear": _always(
        "units are freed and refilled in place; no layer is patched"
    ),
    "gather_16bit_weights_on_model_save": _never(_SAVE),
    "gather_fp16_weights_on_model_save": _never(_SAVE),
    "pipeline_loading_checkpoint": _never("every rank reads only the ranges that it needs"),
    "override_module_apply": _always("no module is patched"),
    "log_trace_cache_warnings": _never("units are gathered when they are used; there is no trace"),
    "enable_sanity_checks": _never("the checks are cheap and always enabled"),
    "save_muon_momentum_buffer_in_memory": _never("offload_optimizer decides where states are"),
    "grad_hooks": _always("old name: gradients are always reduced by hooks, as they arrive"),
    "legacy_stage1": Refused(
        Flag, "the legacy stage 1 is not supported; remove the key", harmless=(False,)
    ),
    "zenflow": offload.ZENFLOW,
}

_PREFIXED = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "module_granularity_threshold"),
    *("use_all_reduce_for_fetch_params", "allgather_sequential"),
    *("gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save"),
)


@final
class LeafModules(Section):
    """DeepSpeed's keys for modules that are one unit each; merged into `units`."""

    classes: Names = Field((), description="class names of modules that are one unit each")
    names: Names = Field((), description="dotted names of modules that are one unit each")
    name_suffixes: Names = Field((), description="ends of the dotted names of such modules")

    def as_globs(self) -> tuple[str, ...]:
        """All entries as class names and dotted-name globs."""
        return (*self.classes, *self.names, *(f"*{suffix}" for suffix in self.name_suffixes))


@final
class ZeroConfig(Section):
    """Which model states are sharded, and how. Sizes are numbers of elements, not bytes."""

    others: ClassVar[Mapping[str, Entry]] = _OTHERS
    aliases: ClassVar[Mapping[str, str]] = {
        **{f"stage3_{name}": name for name in _PREFIXED},
        "cpu_offload_params": "cpu_offload_param",
    }

    stage: Annotated[int, needs("0, 1, 2 or 3", ge=0, le=3), WHOLE] = Field(
        0, description="0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters"
    )
    overlap_comm: Flag = Field(
        True,
        description="collectives overlap with computation; false waits for each one directly. The results are "
        "the same. DeepSpeed's default is true at stage 3 only",
    )
    prefetch_bucket_size: Elements = Field(
        50_000_000,
        description="stage 3: units of at most this many elements are gathered ahead of their use",
    )
    param_persistence_threshold: Elements = Field(
        100_000, description="stage 3: units of at most this many elements stay gathered"
    )
    max_live_parameters: Elements = Field(
        1_000_000_000, description="stage 3: maximum number of gathered elements at a time"
    )
    max_reuse_distance: Elements = Field(
        50_000_000,
        description="stage 3: keep a unit gathered between forward and backward if at most this many other "
        "elements are used in between; 0 keeps the last unit only, and is the default with offload_param "
        "(DeepSpeed's default is 1e9)",
    )
    compute_grad_norm: Flag = Field(
        True,
        description="false, at stages 1 and 2: get_global_grad_norm() returns None. The norm is computed in "
        "any case, because it shows gradients that are not finite",
    )
    shared_parameters: Flag = Field(
        False,
        description="stages 1 and 2 on CPUs: the ranks of a machine have one copy of the parameters that are "
        "trained, which scripts may only read. Updates are written in place and not sent",
    )
    divergent_graphs: Flag = Field(
        False,
        description="stage 3: ranks may call different units. They exchange requests before each gather, and "
        "each rank keeps full gradients until the end of backward",
    )
    mics_shard_size: Annotated[int, Field(ge=-1), WHOLE] = Field(
        -1,
        description="MiCS: so many neighbouring data-parallel ranks share one copy of the model states, and "
        "gradients are summed over the copies once in a step; -1 or 0: all ranks share one. No effect at "
        "stage 0. DeepSpeed reads it at stage 3 only",
    )
    mics_hierarchical_params_gather: Flag = Field(
        False,
        description="where the ranks of mics_shard_size are on several hosts, parameters are gathered across "
        "hosts first, then inside each host",
    )
    units: Names = Field(
        (), description="class names or dotted-name globs of the modules that are one unit each"
    )
    unit_min_numel: Elements = Field(
        2_097_152, description="blocks with fewer elements share a unit with their neighbours"
    )
    leaf_module: LeafModules = nested(LeafModules, "DeepSpeed's names for units; merged into units")

    offload_optimizer: offload.OffloadOptimizer = nested(offload.OffloadOptimizer)
    offload_param: offload.OffloadParam = nested(offload.OffloadParam)
    cpu_offload_param: Flag = Field(
        False, description='DeepSpeed\'s old name of offload_param.device = "cpu"'
    )
    cpu_offload: Flag = Field(
        False, description='DeepSpeed\'s old name of offload_optimizer.device = "cpu"'
    )
    cpu_offload_use_pin_memory: Flag = Field(
        True, description="DeepSpeed's old name of offload_optimizer.pin_memory"
    )

    zero_quantized_weights: Flag = Field(
        False,
        description="stage 3: parameters are gathered in 8 bits, and computed with as they arrive",
    )
    zero_quantized_nontrainable_weights: Flag = Field(
        False, description="stage 3: the same for parameters that are frozen at `initialize`"
    )
    zero_hpz_partition_size: Natural = Field(
        1,
        description="stage 3: so many neighbouring ranks of a host keep the parameters from a gather to "
        "the update; 0 and 1 do not",
    )
    zero_quantized_gradients: Flag = Field(
        False,
        description="stages 1 to 3: gradients are sent in 4 bits, inside each host and then across",
    )
    zeropp_loco_param: compression.Loco | None = Field(
        None, description="feeds back what 4-bit gradients lose; {} takes the defaults"
    )

    @property
    def shows_grad_norm(self) -> bool:
        """get_global_grad_norm() returns the norm."""
        return self.compute_grad_norm or self.stage not in (1, 2)

    @property
    def compresses(self) -> bool:
        """Some part of ZeRO++ is enabled."""
        weights = self.zero_quantized_weights or self.zero_quantized_nontrainable_weights
        return weights or self.zero_quantized_gradients or self.zero_hpz_partition_size > 1

    def with_old_names(self) -> ZeroConfig:
        """A copy whose offload sections also have the values of the old names."""
        values = {"device": "cpu", "pin_memory": self.cpu_offload_use_pin_memory}
        changes: dict[str, Section] = {}
        if self.cpu_offload:
            changes["offload_optimizer"] = self.offload_optimizer.model_copy(update=values)
        if self.cpu_offload_param:
            changes["offload_param"] = self.offload_param.model_copy(update=values)
        return self.model_copy(update=changes)

    def with_leaf_modules(self) -> ZeroConfig:
        """A copy whose `units` also contains the entries of `leaf_module`."""
        merged = tuple(dict.fromkeys((*self.units, *self.leaf_module.as_globs())))
        return self if merged == self.units else self.model_copy(update={"units": merged})
