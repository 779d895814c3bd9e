"""The sections of compressed training: `compression_training` and its older form `quantize_training`.

A technique has `shared_parameters` and `different_groups`: {name: {params, modules, related_modules}}. Names of
groups are free, so `read_groups` reads them, and each complaint has the full path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, final

from pydantic import BeforeValidator, Field

from ...utils.schema.section import Entry, NoEffect, Report, Section, nested, read_section
from ...utils.schema.values import (
    ANY_CASE,
    TUPLE,
    WHOLE,
    Count,
    Flag,
    Names,
    Natural,
    Object,
    Share,
    needs,
)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


EVERY = "*"  # a pattern: every module that the technique can compress
MOST_BITS = 16
_ONE_TEXT = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Patterns = Annotated[
    tuple[str, ...],
    Field(fail_fast=True),
    TUPLE,
    _ONE_TEXT,
    needs('a list of regular expressions, e.g. ["attention"]'),
]
_LISTS = BeforeValidator(
    lambda value: tuple(map(_as_tuple, value)) if isinstance(value, list) else value
)
Related = Annotated[
    tuple[tuple[str, ...], ...],
    _LISTS,
    needs("a list with a list of regular expressions for each entry of modules"),
]
Bits = Annotated[int, Field(ge=1, le=MOST_BITS), WHOLE]
Kind = Annotated[Literal["symmetric", "asymmetric"], ANY_CASE]
Rounding = Annotated[Literal["nearest", "stochastic"], ANY_CASE]

_KERNEL = NoEffect(Flag, "torch quantizes; torch.compile fuses it", same=(False,))
_SNIP = 'it belongs to the method "snip_momentum"'
_EXTRAS: dict[str, Entry] = {
    "schedule_offset_end": NoEffect(Natural, "a technique that has begun stays on"),
    "block_pattern": NoEffect(str, _SNIP),
    "dense_ratio": NoEffect(float, _SNIP),
    "schedule_offset_stride": NoEffect(Natural, _SNIP),
    "excluded_modules": NoEffect(list, _SNIP),
}


CUTTING = ("row_pruning", "head_pruning", "channel_pruning")  # techniques with related modules


@final
@dataclass(frozen=True)
class Group:
    """One group of a technique. related: for each pattern of `modules` the patterns of what is cut with it."""

    name: str
    params: Any
    modules: tuple[str, ...]
    related: tuple[tuple[str, ...], ...]


# -- groups -----------------------------------------------------------------------------------------------


@final
class WeightBits(Section):
    """Parameters of a group of weight_quantization."""

    start_bits: Bits | None = Field(None, description="bits at first")
    target_bits: Bits | None = Field(None, description="bits in the end")
    quantization_period: Natural = Field(1, description="steps until the first bit is dropped")

    def missing(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, need) of each problem."""
        for name in ("start_bits", "target_bits"):
            if getattr(self, name) is None:
                yield name, None, f"is required: a number of bits, 1 to {MOST_BITS}"
        if self.start_bits and self.target_bits and self.start_bits < self.target_bits:
            yield (
                "start_bits",
                self.start_bits,
                f"must be at least target_bits ({self.target_bits})",
            )


@final
class ActivationBits(Section):
    """Parameters of a group of activation_quantization."""

    bits: Annotated[int, needs("4 or 8")] | None = Field(None, description="4 or 8")

    def missing(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, need) of each problem."""
        if self.bits not in (4, 8):
            yield "bits", self.bits, "must be 4 or 8"


@final
class Density(Section):
    """Parameters of a group of a pruning technique."""

    dense_ratio: Share | None = Field(None, description="the share that is kept")

    def missing(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, need) of each problem."""
        if not self.dense_ratio:
            yield "dense_ratio", self.dense_ratio, "must be a number above 0, at most 1"


@final
class _GroupText(Section):
    """A group as the file has it."""

    params: Object = Field({}, description="parameters of the group")
    modules: Patterns = Field((EVERY,), description="regular expressions of module names")
    related_modules: Related | None = Field(None, description="what is cut with the modules")


def read_groups(technique: Any, path: str, report: Report) -> list[Group]:
    """The groups of a technique, with complaints about each."""
    path, found = f"{path}.different_groups", []
    for name, value in technique.different_groups.items():
        here = f"{path}.{name}"
        text = read_section(_GroupText, value, here, report)
        if text is None:
            continue
        params = read_section(technique.of_group, text.params, f"{here}.params", report)
        if params is None:
            continue
        for key, wrong, need in params.missing():
            report.complain(f"{here}.params.{key}", wrong, need)
        _check_modules(text, technique.shared_parameters.enabled, here, report)
        found.append(Group(name, params, text.modules, text.related_modules or ()))
    return found


def _check_modules(text: _GroupText, enabled: bool, here: str, report: Report) -> None:
    """Complain about the patterns of a group."""
    modules, related = list(text.modules), list(map(list, text.related_modules or ()))
    if enabled and not modules:
        need = 'must name layers, e.g. ["attention", "mlp"]; or remove the group'
        report.complain(f"{here}.modules", modules, need)
    if any(related) and here.split(".")[-3] not in CUTTING:
        need = f"nothing is cut by it, but by {', '.join(CUTTING)}; remove it"
        report.complain(f"{here}.related_modules", related, need)
    if related and len(related) != len(modules):
        need = f"must have an entry for each of the {len(modules)} entries of modules"
        report.complain(f"{here}.related_modules", related, need)
    flat = [each for patterns in related for each in patterns]
    for key, value, patterns in (("modules", modules, modules), ("related_modules", related, flat)):
        for pattern in patterns:
            if pattern != EVERY and not _is_pattern(pattern):
                need = f'"{pattern}" is no regular expression; write e.g. ["attention", "mlp"]'
                report.complain(f"{here}.{key}", value, need)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


# -- techniques -------------------------------------------------------------------------------------------

_GROUPS = "groups of modules, named freely: {name: {modules: [...], params: {%s}}}"
_CUT = "groups, named freely: {name: {modules: [...], related_modules: [[...]], params: {dense_ratio}}}"


@final
class MixedQuantization(Section):
    """Moves gradually from whole to quantized weights."""

    enabled: Flag = Field(
        False,
        description="weights are a mean of whole and quantized ones, which moves step by step",
    )
    quantize_change_ratio: Share = Field(
        0.001, description="by how much the share of whole weights falls in a step"
    )


@final
class WeightShared(Section):
    """Settings of all groups of weight_quantization."""

    others: ClassVar[Mapping[str, Entry]] = {"quantizer_kernel": _KERNEL}

    enabled: Flag = Field(False, description="forwards compute with quantized weights")
    schedule_offset: Natural = Field(0, description="steps before the technique begins")
    quantize_groups: Count = Field(
        1, description="groups of a weight that have a scale each; embeddings have one a row"
    )
    quantize_verbose: Flag = Field(False, description="changes of the number of bits are logged")
    quantization_type: Kind = Field("symmetric", description="whether ranges are around zero")
    quantize_weight_in_forward: Flag = Field(
        False,
        description="weights have target_bits from the beginning; false: bits fall from start_bits to "
        "target_bits (mixture of quantization, MoQ)",
    )
    rounding: Rounding = Field(
        "nearest", description="how values are rounded where quantize_weight_in_forward is false"
    )
    fp16_mixed_quantize: MixedQuantization = nested(
        MixedQuantization, "used where quantize_weight_in_forward is false, in any precision"
    )


@final
class ActivationShared(Section):
    """Settings of all groups of activation_quantization."""

    enabled: Flag = Field(False, description="layers get quantized inputs")
    quantization_type: Kind = Field("symmetric", description="whether ranges are around zero")
    range_calibration: Annotated[Literal["dynamic", "static"], ANY_CASE] = Field(
        "dynamic",
        description="dynamic: a range for each token, or image of a convolution; static: a running range, kept "
        "in the buffer x_min_max",
    )
    schedule_offset: Natural = Field(1000, description="steps before the technique begins")


_METHOD = "l1: the largest weights are kept; topk: those with the largest scores, which are learned"


class PruningShared(Section):
    """Settings of all groups of sparse_pruning, row_pruning or channel_pruning."""

    others: ClassVar[Mapping[str, Entry]] = _EXTRAS

    enabled: Flag = Field(False, description="what has no share of dense_ratio is set to zero")
    method: Annotated[Literal["l1", "topk"], ANY_CASE] = Field("l1", description=_METHOD)
    schedule_offset: Natural = Field(1000, description="steps before the technique begins")
    mask_at_init: Flag = Field(
        False,
        description="masks of l1 are computed from the first weights, as in DeepSpeed, and not at "
        "schedule_offset",
    )


@final
class HeadShared(Section):
    """Settings of all groups of head_pruning."""

    others: ClassVar[Mapping[str, Entry]] = _EXTRAS

    enabled: Flag = Field(False, description="heads without a share of dense_ratio are set to zero")
    method: Annotated[Literal["l1", "topk"], ANY_CASE] = Field(
        "topk",
        description="l1: heads with the largest columns in the output projection are kept (only xds has "
        "it); topk: those with the largest scores, which are learned",
    )
    schedule_offset: Natural = Field(1000, description="steps before the technique begins")
    mask_at_init: Flag = Field(
        False,
        description="masks of l1 are computed from the first weights, and not at schedule_offset",
    )
    num_heads: Count | None = Field(None, description="heads of an attention; required")


@final
class WeightQuantization(Section):
    """Weights in few bits."""

    of_group: ClassVar[type[Section]] = WeightBits
    shared_parameters: WeightShared = nested(WeightShared)
    different_groups: Object = Field(
        {}, description=_GROUPS % "start_bits, target_bits, quantization_period (1)"
    )


@final
class ActivationQuantization(Section):
    """Inputs of layers in few bits."""

    of_group: ClassVar[type[Section]] = ActivationBits
    shared_parameters: ActivationShared = nested(ActivationShared)
    different_groups: Object = Field({}, description=_GROUPS % "bits (4 or 8)")


@final
class Pruning(Section):
    """Weights, rows or channels that become zero."""

    of_group: ClassVar[type[Section]] = Density
    shared_parameters: PruningShared = nested(PruningShared)
    different_groups: Object = Field({}, description=_CUT)


@final
class HeadPruning(Section):
    """Attention heads that become zero: columns of the output projection."""

    of_group: ClassVar[type[Section]] = Density
    shared_parameters: HeadShared = nested(HeadShared)
    different_groups: Object = Field({}, description=_CUT)


Numbers = Annotated[
    tuple[Natural, ...], Field(fail_fast=True), TUPLE, needs("a list of layer numbers, at least 0")
]


@final
class LayerReduction(Section):
    """A student with fewer layers gets those of a teacher."""

    enabled: Flag = Field(False, description="init_compression copies layers of teacher_model")
    keep_number_layer: Count | None = Field(None, description="layers of the student")
    module_name_prefix: str = Field("", description='the list of layers, e.g. "bert.encoder.layer"')
    teacher_layer: Numbers = Field((), description="the teacher's layer for each of the student's")
    other_module_name: Names = Field((), description="modules that are copied whole")

    def check(self, path: str, report: Report) -> None:
        """A number of layers that contradicts the list."""
        count = self.keep_number_layer
        if not self.enabled:
            return
        if not self.module_name_prefix:
            report.complain(f"{path}.module_name_prefix", "", "name the list of layers")
        if not self.teacher_layer:
            report.complain(f"{path}.teacher_layer", [], "give a layer of the teacher for each")
        elif count is not None and count != len(self.teacher_layer):
            need = f"must be the length of teacher_layer ({len(self.teacher_layer)}), or left out"
            report.complain(f"{path}.keep_number_layer", count, need)


TECHNIQUES = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)


class Neighbours(Protocol):
    """What the rules of these sections read of the rest of the config."""

    @property
    def tensor_ranks(self) -> int: ...
    @property
    def compression_training(self) -> CompressionTraining: ...
    @property
    def quantize_training(self) -> QuantizeTraining: ...


@final
class CompressionTraining(Section):
    """Compresses the model while it trains; see docs/compressed-training.md."""

    weight_quantization: WeightQuantization = nested(WeightQuantization, "weights in few bits")
    activation_quantization: ActivationQuantization = nested(
        ActivationQuantization, "inputs of layers in few bits"
    )
    sparse_pruning: Pruning = nested(Pruning, "single weights that become zero")
    row_pruning: Pruning = nested(Pruning, "rows of linear layers that become zero")
    head_pruning: HeadPruning = nested(HeadPruning, "attention heads that become zero")
    channel_pruning: Pruning = nested(Pruning, "channels of convolutions that become zero")
    layer_reduction: LayerReduction = nested(LayerReduction, "fewer layers")

    @property
    def enabled(self) -> tuple[str, ...]:
        """The techniques that are switched on, without layer_reduction."""
        return tuple(n for n in TECHNIQUES if getattr(self, n).shared_parameters.enabled)

    def groups(self, technique: str) -> list[Group]:
        """The groups of a technique, checked by `check`."""
        return read_groups(getattr(self, technique), technique, Report())

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`."""
        self.check(report)
        if self.layer_reduction.enabled:
            report.notes.append(
                "compression_training.layer_reduction: xds.compression.init_compression(model, config, "
                "teacher) "
                "copies the layers; xds.initialize does not"
            )
        if config.tensor_ranks > 1 and (self.enabled or config.quantize_training.is_on):
            names = ", ".join(self.enabled or ("quantize_training",))
            report.complain(
                "tensor_parallel.tp_size",
                config.tensor_ranks,
                f"must be 1 with {names}: slices have no masks of whole weights; use stage 3 or pipelines",
            )

    def check(self, report: Report, path: str = "compression_training") -> None:
        """What several keys of a technique must be together, in a section at `path`."""
        for name in TECHNIQUES:
            technique, here = getattr(self, name), f"{path}.{name}"
            shared = technique.shared_parameters
            groups = read_groups(technique, here, report)
            if not shared.enabled:
                continue
            if not technique.different_groups:
                report.complain(
                    f"{here}.different_groups",
                    {},
                    'name the modules, e.g. {"all": {"params": {...}, "modules": ["*"]}}',
                )
            if name == "weight_quantization":
                _check_low_bits(shared, groups, here, report)
        heads = self.head_pruning.shared_parameters
        if heads.enabled and heads.num_heads is None:
            report.complain(
                f"{path}.head_pruning.shared_parameters.num_heads", None, "is required: a number"
            )
        self.layer_reduction.check(f"{path}.layer_reduction", report)


def _check_low_bits(shared: WeightShared, groups: list[Group], here: str, report: Report) -> None:
    """1 and 2 bits are symmetric, and rounded to the nearest."""
    for group in groups:
        bits = group.params.target_bits
        if bits is None or bits > 2:
            continue
        if shared.quantization_type != "symmetric":
            need = f"must be symmetric, because group {group.name} has target_bits = {bits}"
            report.complain(f"{here}.shared_parameters.quantization_type", "asymmetric", need)
        if shared.rounding != "nearest" and not shared.quantize_weight_in_forward:
            need = f"must be nearest, because group {group.name} has target_bits = {bits}"
            report.complain(f"{here}.shared_parameters.rounding", "stochastic", need)


# -- the older form ---------------------------------------------------------------------------------------


@final
class OldBits(Section):
    """First and last number of bits."""

    start_bits: Bits = Field(16, description="bits at first")
    target_bits: Bits = Field(8, description="bits in the end")


@final
class OldSchedule(Section):
    """When the number of bits falls."""

    quantize_period: Natural = Field(100, description="steps until the first bit is dropped")
    schedule_offset: Natural = Field(0, description="steps before weights are quantized")


@final
class OldAlgorithm(Section):
    """How values are rounded."""

    q_type: Kind = Field("symmetric", description="whether ranges are around zero")
    rounding: Rounding = Field("nearest", description="how values are rounded")


EIGENVALUE = (
    "all layers keep their bits equally long; DeepSpeed has switched eigenvalues off as well"
)


@final
class QuantizeTraining(Section):
    """MoQ of the weights of all layers that can be compressed: an older form of compression_training."""

    others: ClassVar[Mapping[str, Entry]] = {
        "quantizer_kernel": _KERNEL,
        "quantize_eigenvalue": NoEffect(Flag, EIGENVALUE, same=(False,)),
        "eigenvalue": NoEffect(Object, EIGENVALUE),
    }
    aliases: ClassVar[Mapping[str, str]] = {"quantize-algo": "quantize_algo"}

    enabled: Flag | None = Field(
        None, description="weights are quantized; null: where quantize_bits is given"
    )
    quantize_verbose: Flag = Field(False, description="changes of the number of bits are logged")
    quantize_type: Kind | None = Field(None, description="another name of quantize_algo.q_type")
    quantize_groups: Count = Field(1, description="groups of a weight that have a scale each")
    quantize_bits: OldBits = nested(OldBits, "first and last number of bits")
    quantize_schedule: OldSchedule = nested(OldSchedule, "when the number of bits falls")
    quantize_algo: OldAlgorithm = nested(OldAlgorithm, "how values are rounded")
    fp16_mixed_quantize: MixedQuantization = nested(MixedQuantization, "mixes with whole weights")

    @property
    def is_on(self) -> bool:
        given = "start_bits" in self.quantize_bits.model_fields_set
        return given if self.enabled is None else self.enabled

    def shown_value(self, name: str) -> Any:
        """`enabled` as what null means here: a dict of all keys gives quantize_bits, too."""
        return self.is_on if name == "enabled" else super().shown_value(name)

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`. The newer form must not be given as well."""
        if self.is_on and "weight_quantization" in config.compression_training.enabled:
            report.complain(
                "quantize_training.enabled",
                True,
                "compression_training.weight_quantization quantizes weights already; keep one of the two",
            )
        bits = self.quantize_bits
        if bits.start_bits < bits.target_bits:
            need = f"must be at least target_bits ({bits.target_bits})"
            report.complain("quantize_training.quantize_bits.start_bits", bits.start_bits, need)

    def applied_to(self, section: CompressionTraining) -> CompressionTraining:
        """`section` with these settings as its weight_quantization; unchanged if this is off."""
        if not self.is_on:
            return section
        quantization: dict[str, Any] = {
            "shared_parameters": {
                "enabled": True,
                "schedule_offset": self.quantize_schedule.schedule_offset,
                "quantize_groups": self.quantize_groups,
                "quantize_verbose": self.quantize_verbose,
                "quantization_type": self.quantize_type or self.quantize_algo.q_type,
                "rounding": self.quantize_algo.rounding,
                "fp16_mixed_quantize": self.fp16_mixed_quantize.as_dict(),
            },
            "different_groups": {
                "all": {
                    "params": {
                        **self.quantize_bits.as_dict(),
                        "quantization_period": self.quantize_schedule.quantize_period,
                    },
                    "modules": [EVERY],
                }
            },
        }
        report = Report()
        read = read_section(WeightQuantization, quantization, "quantize_training", report)
        assert read is not None, report.complaints
        return section.model_copy(update={"weight_quantization": read})


__all__ = [
    "EIGENVALUE",
    "EVERY",
    "TECHNIQUES",
    "CompressionTraining",
    "Group",
    "QuantizeTraining",
]
