"""The section zero_optimization: which model states are sharded, in which units and buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Protocol, final

from pydantic import Field

from ..compression import config as compression
from ..offload import config as offload
from ..ops.comm.config import Communication
from ..utils.schema.section import Entry, NoEffect, Refused, Report, Section, nested
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


class Neighbours(Protocol):
    """What the rules of this section read of the rest of the config."""

    @property
    def optimizer_type(self) -> str: ...
    @property
    def needs_whole_tensors(self) -> bool: ...
    @property
    def gradient_clipping(self) -> float: ...
    @property
    def communication(self) -> Communication: ...
    @property
    def pipeline_stages(self) -> int: ...


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

    def canonical(self, report: Report) -> ZeroConfig:
        """This section with the old names and leaf modules in the newer keys, and without idle offload."""
        self._check_old_names(report)
        return self.with_leaf_modules().with_old_names()._without_idle_offload(report)

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`."""
        if config.gradient_clipping > 0 and not self.shows_grad_norm:
            report.complain(
                "zero_optimization.compute_grad_norm",
                False,
                "requires gradient_clipping=0, because clipping needs the norm; remove the key",
            )
        if config.pipeline_stages > 1 and self.divergent_graphs:
            report.complain(
                "zero_optimization.divergent_graphs",
                True,
                "pipeline stages have a fixed order of layers, which the ranks of a stage share; set it to "
                "false, or pipeline.stages to 1",
            )
        self._check_offload(config, report)
        self._check_mics(report)
        self._check_shared_parameters(config, report)
        if config.optimizer_type in compression.ONE_BIT_OPTIMIZERS:
            self._check_one_bit(config.optimizer_type, report)
        self._check_zeropp(config.optimizer_type, report)

    def _check_old_names(self, report: Report) -> None:
        """DeepSpeed's old names must not contradict the sections; a section without a device does nothing."""
        for old, name in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            section = getattr(self, name)
            given = section.model_fields_set
            if getattr(self, old) and "device" in given and section.device != "cpu":
                report.complain(
                    f"zero_optimization.{old}",
                    True,
                    f'it means {name}.device = "cpu", and {name}.device is "{section.device}": remove {old}',
                )
            if given and "device" not in given and not getattr(self, old):
                report.notes.append(
                    f'zero_optimization.{name} has no device, so nothing is offloaded: set it to "cpu" or '
                    '"nvme"'
                )

    def _without_idle_offload(self, report: Report) -> ZeroConfig:
        """This section with the parameters on the device below stage 3, where they are not sharded."""
        section = self.offload_param
        if section.device == "none" or self.stage == 3:
            return self
        report.without_effect.append(
            (
                "zero_optimization.offload_param.device",
                f"parameters are sharded at stage 3 only, and the stage is {self.stage}: they stay on the "
                "device "
                "(offload_optimizer works at every stage)",
            )
        )
        off = section.model_copy(update={"device": "none"})
        return self.model_copy(update={"offload_param": off, "cpu_offload_param": False})

    def _check_offload(self, config: Neighbours, report: Report) -> None:
        """A file needs a folder; updates during backward need a host and an optimizer of single elements."""
        offload, key = self.offload_optimizer, "zero_optimization.offload_optimizer.super_offload"
        if offload.super_offload and offload.device == "none":
            report.complain(
                key, True, 'it needs updates on the host: set offload_optimizer.device to "cpu"'
            )
        if offload.super_offload and offload.device == "nvme":
            report.notes.append(
                'offload_optimizer.super_offload has no effect with device "nvme": these updates wait for '
                "the norm"
            )
        if offload.super_offload and config.needs_whole_tensors:
            report.complain(
                key,
                True,
                f"{config.optimizer_type} uses norms or products of whole tensors, which are known after "
                "backward only: "
                "set it to false, or choose an optimizer such as AdamW",
            )
        for name in ("offload_optimizer", "offload_param"):
            section, key = getattr(self, name), f"zero_optimization.{name}.nvme_path"
            if section.nvme_path is not None and "\0" in section.nvme_path:
                report.complain(key, section.nvme_path, "a path has no null character")
            if section.device == "nvme" and not section.nvme_path:
                report.complain(
                    key,
                    section.nvme_path,
                    'device = "nvme" needs a folder on a local disk, such as "/local_nvme"; set nvme_path, '
                    "or the "
                    'device to "cpu"',
                )

    def _check_mics(self, report: Report) -> None:
        """Where shard groups contradict other keys, or have no effect."""
        size, key = self.mics_shard_size, "zero_optimization.mics_shard_size"
        hierarchical = "zero_optimization.mics_hierarchical_params_gather"
        if self.mics_hierarchical_params_gather and size <= 1:
            report.notes.append(
                f"{hierarchical} has no effect without {key}, the ranks that share one copy of the model"
            )
        if size > 0 and self.stage == 0:
            report.notes.append(
                f"{key} = {size} has no effect at stage 0, where every rank holds everything"
            )
        if size <= 0 or self.stage == 0:
            return
        if self.zero_hpz_partition_size > 1:
            report.complain(
                "zero_optimization.zero_hpz_partition_size",
                self.zero_hpz_partition_size,
                f"second shards keep what gathers across hosts brought, and shard groups ({key} = {size}) are "
                "for no such gathers: remove one of the two keys",
            )
        if self.mics_hierarchical_params_gather and (
            self.zero_quantized_weights or self.zero_quantized_nontrainable_weights
        ):
            report.complain(
                hierarchical,
                True,
                "it gathers exact parameters, and gathers in 8 bits have two levels already: set it to "
                "false, or "
                "remove zero_quantized_weights and zero_quantized_nontrainable_weights",
            )
        if size == 1 and self.offload_param.device != "none":
            report.complain(
                key,
                size,
                "with one rank nothing is sharded, and offload_param is for sharded parameters: set it to 2 or "
                'more, or offload_param.device to "none"',
            )

    def _check_shared_parameters(self, config: Neighbours, report: Report) -> None:
        """What excludes one copy of the parameters for all ranks of a machine."""
        if not self.shared_parameters:
            return
        broken = {
            "at stage 0 every rank updates all parameters: set stage to 1 or 2": self.stage == 0,
            "at stage 3 no rank keeps all parameters: set stage to 1 or 2": self.stage == 3,
            "with mics_shard_size = 1 every rank updates all parameters: set mics_shard_size to 2 or more, "
            "or to "
            "-1 for one shard group of all ranks": self.stage > 0 and self.mics_shard_size == 1,
            "with offload_optimizer a rank may write new values while other ranks still read the old ones: set "
            'offload_optimizer.device to "none"': self.offload_optimizer.device != "none",
            f"{config.optimizer_type} sends differences of one bit, and updates in place send nothing: "
            "choose AdamW": (config.optimizer_type in compression.ONE_BIT_OPTIMIZERS),
            "communication.shared_memory is false: set it to true": (
                not config.communication.shared_memory
            ),
        }
        for need, is_broken in broken.items():
            if is_broken:
                report.complain(
                    "zero_optimization.shared_parameters", True, f"{need}, or remove the key"
                )

    def _check_one_bit(self, name: str, report: Report) -> None:
        """Where a one-bit optimizer cannot follow the other sections."""
        if self.stage == 3:
            report.complain(
                "zero_optimization.stage",
                3,
                f"{name} sends gradients of one bit; two thirds of what stage 3 sends are parameters, "
                "which stay "
                "exact: set stage to 0, 1 or 2, or choose AdamW",
            )
        if self.mics_shard_size > 0 and self.stage > 0:
            report.complain(
                "zero_optimization.mics_shard_size",
                self.mics_shard_size,
                f"{name} keeps for each rank what its messages have lost, and sums over replicas are exact "
                "fp32 "
                "numbers, so nothing would be saved there: remove the key, or choose AdamW",
            )
        for key in ("offload_optimizer", "offload_param"):
            device = getattr(self, key).device
            if device != "none":
                report.complain(
                    f"zero_optimization.{key}.device",
                    device,
                    f"{name} computes its messages from moments and masters on the device of the parameters: "
                    'set it to "none", or choose AdamW',
                )

    def _check_zeropp(self, optimizer_type: str, report: Report) -> None:
        """Keys of ZeRO++ that need another stage, or exclude one another."""
        gradients = "zero_optimization.zero_quantized_gradients"
        parts = {
            "zero_quantized_weights": self.zero_quantized_weights,
            "zero_quantized_nontrainable_weights": self.zero_quantized_nontrainable_weights,
            "zero_hpz_partition_size": self.zero_hpz_partition_size,
        }
        for key, value in parts.items():
            is_set = value is True or value not in (0, 1)
            if is_set and self.stage != 3:
                report.complain(
                    f"zero_optimization.{key}",
                    value,
                    "only stage 3 gathers parameters for each forward and backward: set stage to 3, or "
                    "remove the "
                    "key",
                )
            elif is_set and self.divergent_graphs:
                report.complain(
                    f"zero_optimization.{key}",
                    value,
                    "with divergent_graphs parameters are sent to the ranks that ask for them, exactly: set "
                    "divergent_graphs to false, or remove the key",
                )
        if self.zero_quantized_gradients and self.stage == 0:
            report.complain(
                gradients,
                True,
                "stage 0 sends sums of gradients as well, which stay exact: set stage to 1, 2 or 3, or "
                "optimizer.type to OneBitAdam",
            )
        if self.zero_quantized_gradients and optimizer_type in compression.ONE_BIT_OPTIMIZERS:
            text = f"{optimizer_type} sends gradients in one bit already: set it to false"
            report.complain(gradients, True, text)
        if self.zeropp_loco_param is not None and not self.zero_quantized_gradients:
            report.complain(
                "zero_optimization.zeropp_loco_param",
                self.zeropp_loco_param.as_dict(),
                "it feeds back what 4-bit gradients lose: set zero_quantized_gradients to true, or remove "
                "the key",
            )
