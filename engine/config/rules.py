"""Rules between sections of the config. They are checked where every type and key is right.

The rules of one section are its method `check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...utils.schema.section import Report
from ...zero.config import ZeroConfig
from ..data.config import BATCHING
from .optimizer import WHOLE_TENSOR
from .scheduler import warmup_steps

_ZERO = "zero_optimization"


def check_together(config: Any, data: Mapping[str, Any], report: Report) -> Any:
    """Check what depends on several sections; make offload and leaf modules canonical.

    config: the `Config` as read, without complaints; data: what it was read from. Returns the changed `Config`.
    """
    _check_old_names(config.zero_optimization, report)
    zero = config.zero_optimization.with_leaf_modules().with_old_names()
    zero = _without_idle_offload(zero, report)
    config = config.model_copy(update={_ZERO: zero})
    _check_precision(config, report)
    _check_data(config, data, report)
    _check_norm(config, report)
    _check_offload(config, report)
    _check_mics(zero, report)
    _check_shared_parameters(config, report)
    _check_one_bit(config, report)
    _check_zeropp(config, report)
    config.elasticity.check(data, report)
    if config.sparse_attention is not None:
        config.sparse_attention.check(report)
    check_stages(config, report)
    check_slices(config, report)
    _check_compressed(config, report)
    check_sequences(config, report)
    config.compile.check(zero.stage, report)
    config.ops.check(report)
    if data.get("gradient_clipping") is None:
        report.notes.append(
            "gradient_clipping is not given: gradients are not clipped "
            "(DeepSpeed clips at 1.0 since version 0.19)"
        )
    return config


def _kind(config: Any) -> str:
    """The type of the optimizer, or ""."""
    return "" if config.optimizer is None else str(config.optimizer.type)


def _check_precision(config: Any, report: Report) -> None:
    """Two precisions at once, and another dtype of parameters than theirs."""
    enabled = [name for name in ("fp16", "bf16") if getattr(config, name).enabled]
    wanted, actual = config.data_types.param_dtype, [*enabled, "fp32"][0]
    if len(enabled) > 1:
        report.complain(
            "fp16.enabled",
            True,
            "fp16.enabled and bf16.enabled exclude one another; switch on one of them",
        )
    elif wanted not in (None, actual):
        report.complain(
            "data_types.param_dtype",
            wanted,
            f"must be {actual}, the precision that the config switches on; remove it "
            f"or set fp16.enabled or bf16.enabled to match",
        )
    autocast = config.torch_autocast
    for name in enabled if autocast.enabled else ():
        already = " already" if autocast.dtype == name else ""
        report.notes.append(
            f"torch_autocast.enabled = true: parameters are {name}{already}; forward computes in "
            f"{autocast.dtype}, and operations such as softmax and losses in fp32"
        )
    config.fp16.check(report)


def _check_data(config: Any, data: Mapping[str, Any], report: Report) -> None:
    """What takes samples from training_data: only one of them."""
    config.data_packing.check(report)
    config.curriculum_learning.check(report)
    config.data_efficiency.check(report)
    given: Any = data
    for key in BATCHING.split("."):
        given = given.get(key) or {}
    if given.get("lr_scaling_method", "") is None:
        report.notes.append(
            f'{BATCHING}.lr_scaling_method = null: means the default, "linear"; DeepSpeed takes it for "none"'
        )
    sampling = config.data_efficiency.data_sampling
    for name, is_on in (
        ("curriculum_learning", sampling.has_curriculum),
        ("dynamic_batching", sampling.has_dynamic_batches),
    ):
        if is_on and config.data_packing.tokens:
            report.complain(
                "data_packing.tokens",
                config.data_packing.tokens,
                f"data_efficiency.data_sampling.{name} chooses the samples as well; remove one of the two",
            )


def _check_compressed(config: Any, report: Report) -> None:
    section, old = config.compression_training, config.quantize_training
    section.check(report)
    old.check(section, report)
    if section.layer_reduction.enabled:
        report.notes.append(
            "compression_training.layer_reduction: xds.compression.init_compression(model, config, teacher) "
            "copies the layers; xds.initialize does not"
        )
    if config.tensor_parallel.size > 1 and (section.enabled or old.is_on):
        names = ", ".join(section.enabled or ("quantize_training",))
        report.complain(
            "tensor_parallel.tp_size",
            config.tensor_parallel.size,
            f"must be 1 with {names}: slices have no masks of whole weights; use stage 3 or pipelines",
        )


def _check_norm(config: Any, report: Report) -> None:
    if config.gradient_clipping > 0 and not config.zero_optimization.shows_grad_norm:
        report.complain(
            f"{_ZERO}.compute_grad_norm",
            False,
            "requires gradient_clipping=0, because clipping needs the norm; remove the key",
        )


# ---- offload -------------------------------------------------------------------------------------


def _check_old_names(zero: ZeroConfig, report: Report) -> None:
    """DeepSpeed's old names must not contradict the sections; a section without a device does nothing."""
    for old, name in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
    ):
        section = getattr(zero, name)
        given = section.model_fields_set
        if getattr(zero, old) and "device" in given and section.device != "cpu":
            report.complain(
                f"{_ZERO}.{old}",
                True,
                f'it means {name}.device = "cpu", and {name}.device is "{section.device}": remove {old}',
            )
        if given and "device" not in given and not getattr(zero, old):
            report.notes.append(
                f'{_ZERO}.{name} has no device, so nothing is offloaded: set it to "cpu" or "nvme"'
            )


def _without_idle_offload(zero: ZeroConfig, report: Report) -> ZeroConfig:
    """`zero` with the parameters on the device below stage 3, where they are not sharded."""
    section = zero.offload_param
    if section.device == "none" or zero.stage == 3:
        return zero
    report.without_effect.append(
        (
            f"{_ZERO}.offload_param.device",
            f"parameters are sharded at stage 3 only, and the stage is {zero.stage}: they stay on the device "
            "(offload_optimizer works at every stage)",
        )
    )
    off = section.model_copy(update={"device": "none"})
    return zero.model_copy(update={"offload_param": off, "cpu_offload_param": False})


def _check_offload(config: Any, report: Report) -> None:
    """A file needs a folder; updates during backward need a host and an optimizer of single elements."""
    zero = config.zero_optimization
    offload, key = zero.offload_optimizer, f"{_ZERO}.offload_optimizer.super_offload"
    if offload.super_offload and offload.device == "none":
        report.complain(
            key, True, 'it needs updates on the host: set offload_optimizer.device to "cpu"'
        )
    if offload.super_offload and offload.device == "nvme":
        report.notes.append(
            'offload_optimizer.super_offload has no effect with device "nvme": these updates wait for the norm'
        )
    if offload.super_offload and _kind(config) in WHOLE_TENSOR:
        report.complain(
            key,
            True,
            f"{_kind(config)} uses norms or products of whole tensors, which are known after backward only: "
            "set it to false, or choose an optimizer such as AdamW",
        )
    for name in ("offload_optimizer", "offload_param"):
        section, key = getattr(zero, name), f"{_ZERO}.{name}.nvme_path"
        if section.nvme_path is not None and "\0" in section.nvme_path:
            report.complain(key, section.nvme_path, "a path has no null character")
        if section.device == "nvme" and not section.nvme_path:
            report.complain(
                key,
                section.nvme_path,
                'device = "nvme" needs a folder on a local disk, such as "/local_nvme"; set nvme_path, or the '
                'device to "cpu"',
            )


# ---- ranks that share a model --------------------------------------------------------------------


def check_stages(config: Any, report: Report) -> None:
    """Check what several pipeline stages do not allow."""
    section, elasticity = config.pipeline, config.elasticity
    section.check(report)
    stages, tensor, sequence = (
        section.stages,
        config.tensor_parallel.size,
        config.sequence_parallel_size,
    )
    if elasticity.enabled and elasticity.model_parallel_size != stages * tensor * sequence:
        factor = f" x tensor_parallel.tp_size ({tensor})" if tensor > 1 else ""
        factor += f" x sequence_parallel_size ({sequence})" if sequence > 1 else ""
        report.complain(
            "elasticity.model_parallel_size",
            elasticity.model_parallel_size,
            f"must equal pipeline.stages ({stages}){factor}, the number of ranks that hold one model; set both "
            "to the same number (`xds elastic` plans with any)",
        )
    if stages == 1:
        return
    if not config.managed_gradient_accumulation:
        report.complain(
            "managed_gradient_accumulation",
            False,
            "pipeline stages run all micro-batches of an update in one call of train_batch, so the engine "
            "counts them; set it to true, or pipeline.stages to 1",
        )
    if config.activation_checkpointing.enabled and section.activation_checkpoint_interval:
        report.complain(
            "pipeline.activation_checkpoint_interval",
            section.activation_checkpoint_interval,
            "the section activation_checkpointing recomputes every block already; remove one of the two",
        )
    if config.zero_optimization.divergent_graphs:
        report.complain(
            f"{_ZERO}.divergent_graphs",
            True,
            "pipeline stages have a fixed order of layers, which the ranks of a stage share; set it to false, "
            "or pipeline.stages to 1",
        )


def check_slices(config: Any, report: Report) -> None:
    """Check what does not work with slices of tensors."""
    size = config.tensor_parallel.size
    if size > 1 and _kind(config) in (*WHOLE_TENSOR, "Adafactor"):
        report.complain(
            "optimizer.type",
            _kind(config),
            f"it uses norms or products of whole tensors, and tensor_parallel.tp_size = {size} cuts "
            "them; choose an optimizer such as AdamW, or set tensor_parallel.tp_size to 1",
        )
    sparse = config.sparse_attention
    if size > 1 and sparse is not None and sparse.different_layout_per_head:
        report.complain(
            "sparse_attention.different_layout_per_head",
            True,
            f"each of tensor_parallel.tp_size = {size} ranks has some of the heads, and layouts are not cut; "
            "set it to false",
        )


def check_sequences(config: Any, report: Report) -> None:
    """Check what does not work with several sequence ranks."""
    stages = config.pipeline.stages
    if config.sequence_parallel_size > 1 and stages > 1 and config.sequence.cut_by != "engine":
        report.complain(
            "sequence.cut_by",
            "script",
            f'all of pipeline.stages = {stages} read the whole batch; set it to "engine", or the stages to 1',
        )
    sparse = config.sparse_attention
    if config.sequence_parallel_size > 1 and sparse is not None and sparse.mode != "dense":
        report.complain(
            "sparse_attention.mode",
            sparse.mode,
            f"sequence_parallel_size = {config.sequence_parallel_size} exchanges heads around the model's own "
            "attention; remove the section, or set sequence_parallel_size to 1",
        )
    if config.sequence_parallel_size > 1 and config.data_efficiency.drops_tokens:
        report.complain(
            "sequence_parallel_size",
            config.sequence_parallel_size,
            "a layer that drops tokens must have all tokens of a sample on its rank; set it to 1, or "
            "data_efficiency.data_routing.random_ltd.enabled to false",
        )


# ---- what is sent --------------------------------------------------------------------------------


def _check_one_bit(config: Any, report: Report) -> None:
    """Where a one-bit optimizer cannot follow the other sections."""
    name, zero = _kind(config), config.zero_optimization
    if name not in ONE_BIT_OPTIMIZERS:
        return
    if zero.stage == 3:
        report.complain(
            f"{_ZERO}.stage",
            3,
            f"{name} sends gradients of one bit; two thirds of what stage 3 sends are parameters, which stay "
            "exact: set stage to 0, 1 or 2, or choose AdamW",
        )
    if zero.mics_shard_size > 0 and zero.stage > 0:
        report.complain(
            f"{_ZERO}.mics_shard_size",
            zero.mics_shard_size,
            f"{name} keeps for each rank what its messages have lost, and sums over replicas are exact fp32 "
            "numbers, so nothing would be saved there: remove the key, or choose AdamW",
        )
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(zero, key).device
        if device != "none":
            report.complain(
                f"{_ZERO}.{key}.device",
                device,
                f"{name} computes its messages from moments and masters on the device of the parameters: "
                'set it to "none", or choose AdamW',
            )
    freeze, warmup = config.optimizer.params.get("freeze_step"), warmup_steps(config.scheduler)
    if isinstance(freeze, int) and freeze < warmup:
        report.complain(
            "optimizer.params.freeze_step",
            freeze,
            f"the learning rate rises for {warmup} steps, and a variance that is frozen before does not "
            f'fit the gradients after them: set it to {warmup} at least, or to "auto"',
        )


def _check_zeropp(config: Any, report: Report) -> None:
    """Keys of ZeRO++ that need another stage, or exclude one another."""
    zero, gradients = config.zero_optimization, f"{_ZERO}.zero_quantized_gradients"
    parts = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size,
    }
    for key, value in parts.items():
        is_set = value is True or value not in (0, 1)
        if is_set and zero.stage != 3:
            report.complain(
                f"{_ZERO}.{key}",
                value,
                "only stage 3 gathers parameters for each forward and backward: set stage to 3, or remove the "
                "key",
            )
        elif is_set and zero.divergent_graphs:
            report.complain(
                f"{_ZERO}.{key}",
                value,
                "with divergent_graphs parameters are sent to the ranks that ask for them, exactly: set "
                "divergent_graphs to false, or remove the key",
            )
    if zero.zero_quantized_gradients and zero.stage == 0:
        report.complain(
            gradients,
            True,
            "stage 0 sends sums of gradients as well, which stay exact: set stage to 1, 2 or 3, or "
            "optimizer.type to OneBitAdam",
        )
    if zero.zero_quantized_gradients and _kind(config) in ONE_BIT_OPTIMIZERS:
        text = f"{_kind(config)} sends gradients in one bit already: set it to false"
        report.complain(gradients, True, text)
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        report.complain(
            f"{_ZERO}.zeropp_loco_param",
            zero.zeropp_loco_param.as_dict(),
            "it feeds back what 4-bit gradients lose: set zero_quantized_gradients to true, or remove the key",
        )


def _check_mics(zero: ZeroConfig, report: Report) -> None:
    """Where shard groups contradict other keys, or have no effect."""
    size, key = zero.mics_shard_size, f"{_ZERO}.mics_shard_size"
    hierarchical = f"{_ZERO}.mics_hierarchical_params_gather"
    if zero.mics_hierarchical_params_gather and size <= 1:
        report.notes.append(
            f"{hierarchical} has no effect without {key}, the ranks that share one copy of the model"
        )
    if size > 0 and zero.stage == 0:
        report.notes.append(
            f"{key} = {size} has no effect at stage 0, where every rank holds everything"
        )
    if size <= 0 or zero.stage == 0:
        return
    if zero.zero_hpz_partition_size > 1:
        report.complain(
            f"{_ZERO}.zero_hpz_partition_size",
            zero.zero_hpz_partition_size,
            f"second shards keep what gathers across hosts brought, and shard groups ({key} = {size}) are "
            "for no such gathers: remove one of the two keys",
        )
    if zero.mics_hierarchical_params_gather and (
        zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    ):
        report.complain(
            hierarchical,
            True,
            "it gathers exact parameters, and gathers in 8 bits have two levels already: set it to false, or "
            "remove zero_quantized_weights and zero_quantized_nontrainable_weights",
        )
    if size == 1 and zero.offload_param.device != "none":
        report.complain(
            key,
            size,
            "with one rank nothing is sharded, and offload_param is for sharded parameters: set it to 2 or "
            'more, or offload_param.device to "none"',
        )


def _check_shared_parameters(config: Any, report: Report) -> None:
    """What excludes one copy of the parameters for all ranks of a machine."""
    zero = config.zero_optimization
    if not zero.shared_parameters:
        return
    broken = {
        "at stage 0 every rank updates all parameters: set stage to 1 or 2": zero.stage == 0,
        "at stage 3 no rank keeps all parameters: set stage to 1 or 2": zero.stage == 3,
        "with mics_shard_size = 1 every rank updates all parameters: set mics_shard_size to 2 or more, or to "
        "-1 for one shard group of all ranks": zero.stage > 0 and zero.mics_shard_size == 1,
        "with offload_optimizer a rank may write new values while other ranks still read the old ones: set "
        'offload_optimizer.device to "none"': zero.offload_optimizer.device != "none",
        f"{_kind(config)} sends differences of one bit, and updates in place send nothing: choose AdamW": (
            _kind(config) in ONE_BIT_OPTIMIZERS
        ),
        "communication.shared_memory is false: set it to true": (
            not config.communication.shared_memory
        ),
    }
    for need, is_broken in broken.items():
        if is_broken:
            report.complain(f"{_ZERO}.shared_parameters", True, f"{need}, or remove the key")


__all__ = ["check_sequences", "check_slices", "check_stages", "check_together"]
