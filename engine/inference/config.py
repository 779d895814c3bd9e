"""The keys of `xds.init_inference`, which are DeepSpeed's, read from a config and from keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import BeforeValidator, Field

from ...utils.errors import ConfigError
from ...utils.schema.section import (
    Entry,
    Group,
    NoEffect,
    Refused,
    Report,
    Section,
    details,
    nested,
    read_section,
)
from ...utils.schema.values import (
    ANY_CASE,
    DTYPE_NAMES,
    Count,
    Flag,
    Items,
    Object,
    Text,
    needs,
    shown,
)
from ..config.text import read_source

DEFAULT_MAX_TOKENS = 1024

_NAMES = {
    **DTYPE_NAMES,
    **{"torch.half": "fp16", "torch.float": "fp32", "bfloat": "bf16"},
    **dict.fromkeys(("int8", "torch.int8"), "int8"),
}
InferenceDtype = Annotated[
    Literal["fp16", "bf16", "fp32", "int8"],
    needs("fp16, bf16, fp32 or int8, or torch's name of it"),
    BeforeValidator(lambda value: _NAMES.get(str(value).casefold(), value)),
]
Bits = Annotated[Literal[4, 8], needs("4 or 8")]
Symmetry = Annotated[Literal["symmetric", "asymmetric"], ANY_CASE]

_KERNELS = "it belongs to DeepSpeed's kernels; the layers of the model run as they are"
_COUNTS = "the model has as many experts as it has"
_ACTIVATIONS = "only weights are stored in few bits; activations keep their dtype"


@final
class GroupQuant(Section):
    """How a weight is stored in few bits: a scale for each group of `group_size` neighbours.

    group_size: None is a whole row with 8 bits, and at most 64 with 4 bits. num_groups: of a row; 0: by size.
    """

    results: ClassVar[frozenset[str]] = frozenset({"num_groups"})

    num_bits: Bits = Field(8, description="bits of a weight")
    group_size: Count | None = Field(None, description="neighbouring weights that share a scale")
    group_dim: Annotated[Literal[0, 1], needs("0 or 1")] = Field(
        1, description="the groups lie along the inputs (1) or the outputs (0) of a layer"
    )
    symmetric: Flag = Field(False, description="false: a zero point for each group as well")
    num_groups: int = 0


@final
class WeightQuant(Section):
    """How weights are stored in few bits."""

    enabled: Flag = Field(True, description="false: not at all")
    num_bits: Bits = Field(8, description="bits of a weight")
    q_type: Symmetry = Field(
        "symmetric", description="asymmetric: a zero point for each group as well"
    )
    q_groups: Count = Field(1, description="groups of a row of a weight, each with its own scale")
    quantized_initialization: Object = Field(
        default_factory=dict,
        description="num_bits, group_size, group_dim, symmetric: of all layers",
    )
    post_init_quant: Object = Field(
        default_factory=dict, description="part of a layer's name -> the same keys"
    )


@final
class Quant(Section):
    """Weights in 4 or 8 bits, by torchao."""

    others: ClassVar[Mapping[str, Entry]] = {
        "activation": Group(
            "bits of activations",
            {"enabled": NoEffect(Flag, _ACTIVATIONS, same=(False,))},
            details(Any, "num_bits q_type q_groups"),
        ),
        "qkv": Group(
            "whether the layers of an attention are stored so",
            {
                "enabled": Refused(
                    Flag,
                    "name the layers in quant.weight.post_init_quant instead",
                    harmless=(True,),
                )
            },
        ),
    }

    enabled: Flag = Field(True, description="false: weights keep their dtype")
    weight: WeightQuant = nested(WeightQuant)


@final
class InferenceSlices(Section):
    """Layers are cut over ranks."""

    others: ClassVar[Mapping[str, Entry]] = {
        "tp_grain_size": NoEffect(Count, "layers are cut by heads and columns", same=(64,)),
    }

    enabled: Flag = Field(True, description="false: layers are not cut")
    tp_size: Count | None = Field(None, description="ranks that share the layers of a model")
    plan: Object | None = Field(
        None, description="pattern of layer names -> how they are cut, as in a config for training"
    )
    mpu: Any = Field(None, description="an object whose model-parallel ranks share the layers")
    tp_group: Any = Field(None, description="neighbouring ranks, which share the layers")


@final
class InferenceExperts(Section):
    """Experts are on different ranks."""

    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "moe_experts"}
    others: ClassVar[Mapping[str, Entry]] = {
        "moe_experts": NoEffect(Items, _COUNTS, same=([1],)),
        **details(Any, "type ep_mp_group ep_group expert_group"),
    }

    enabled: Flag = Field(True, description="false: each rank has all experts")
    ep_size: Count = Field(1, description="ranks that share the experts of a layer")


@final
class CheckpointConfig(Section):
    """Another place of three keys."""

    checkpoint_dir: Text | None = Field(None, description="as `checkpoint`")
    save_mp_checkpoint_path: Text | None = Field(None, description="as the key of that name")
    base_dir: Text | None = Field(None, description="as the key of that name")


@final
class InferenceConfig(Section):
    """The checked keys of `xds.init_inference`."""

    aliases: ClassVar[Mapping[str, str]] = {
        "tp": "tensor_parallel",
        "kernel_inject": "replace_with_kernel_inject",
        "injection_dict": "injection_policy",
        "ckpt_config": "checkpoint_config",
        "max_tokens": "max_out_tokens",
        "min_tokens": "min_out_tokens",
        "tm": "triangular_masking",
        "args": "config",
        "expert_group": "ep_group",
        "num_experts": "moe_experts",
    }
    results: ClassVar[frozenset[str]] = frozenset({"without_effect", "bit_groups"})
    others: ClassVar[Mapping[str, Entry]] = {
        **dict.fromkeys(
            ("triangular_masking", "return_tuple"), NoEffect(Flag, _KERNELS, same=(True,))
        ),
        **dict.fromkeys(
            ("transposed_mode", "use_triton", "triton_autotune"),
            NoEffect(Flag, _KERNELS, same=(False,)),
        ),
        "injection_policy_tuple": NoEffect(Any, "injection_policy has the layers"),
        "replace_method": NoEffect(Text, _KERNELS, same=("auto", "")),
        "set_empty_params": NoEffect(
            Flag, "build the model on the meta device instead, and give checkpoint", same=(False,)
        ),
        "config": NoEffect(Any, "the model's own config counts"),
        "training_mp_size": Refused(
            Count, "merge the slices of the checkpoint before", harmless=(1,)
        ),
        "moe_experts": NoEffect(Items, _COUNTS, same=([1],)),
        **details(Any, "ep_group ep_mp_group moe_type"),
    }

    dtype: InferenceDtype = Field(
        "fp16",
        description="of weights and activations; int8: weights of 8 bits, in the model's dtype",
    )
    tensor_parallel: InferenceSlices = nested(InferenceSlices)
    moe: InferenceExperts = nested(InferenceExperts)
    ep_size: Count | None = Field(None, description="as moe.ep_size")
    mp_size: Count | None = Field(None, description="old name of tensor_parallel.tp_size")
    mpu: Any = Field(None, description="old name of tensor_parallel.mpu")
    injection_policy: Any = Field(
        None, description="layer class -> names of its linear layers whose outputs are summed"
    )
    replace_with_kernel_inject: Flag = Field(
        False, description="on a GPU, generation is compiled, with a static cache"
    )
    enable_cuda_graph: Flag = Field(
        False, description="on a GPU, the compiled code is a CUDA graph"
    )
    max_out_tokens: Count = Field(
        DEFAULT_MAX_TOKENS, description="the most tokens of a sequence, with its prompt"
    )
    min_out_tokens: Count = Field(1, description="tokens whose cache must fit the free memory")
    checkpoint: Any = Field(None, description="a folder, a file, or DeepSpeed's JSON of files")
    base_dir: Text = Field("", description="the folder of the files that the JSON names")
    checkpoint_config: CheckpointConfig = nested(CheckpointConfig)
    save_mp_checkpoint_path: Text | None = Field(
        None, description="a folder for the weights, which checkpoint then takes at any tp_size"
    )
    keep_module_on_host: Flag = Field(False, description="the module is not moved to the device")
    zero: Object = Field(
        default_factory=dict,
        description="a section zero_optimization; stage 3 shards the weights or streams them",
    )
    quant: Quant = nested(Quant)

    without_effect: tuple[tuple[str, str], ...] = Field(
        (), description="keys that are accepted without effect, each with the reason"
    )
    bit_groups: Mapping[str, GroupQuant] = Field(
        default_factory=dict,
        description='part of a layer\'s name -> how it is stored in few bits; "" is every layer',
    )

    @classmethod
    def load(cls, source: Any = None, given: Mapping[str, Any] | None = None) -> InferenceConfig:
        """Read `source`, a dict, a path or JSON text, and keywords.

        Raises:
            ConfigError: every complaint at once, such as a key with two values.
        """
        if isinstance(source, InferenceConfig):
            values, name = _as_given(source), "config"
        elif source is None or isinstance(source, Mapping):
            values, name = dict(source or {}), "init_inference"
        else:
            values, name, complaints = read_source(source)
            if complaints:
                raise ConfigError(complaints, name)
        report = Report()
        if not isinstance(values, dict):
            raise ConfigError([f"{shown(values)}: must be an object {{...}}"], name)
        merged = _merged(values, given or {}, report)
        if isinstance(merged.get("moe"), bool):
            merged["moe"] = {"enabled": merged["moe"]}
        read = read_section(cls, merged, "", report)
        groups: dict[str, GroupQuant] = {}
        if read is not None:
            read.check(report)
            groups = read._read_groups(report)
        if report.complaints or read is None:
            raise ConfigError(report.complaints, name)
        results = {"without_effect": tuple(report.without_effect), "bit_groups": groups}
        return read.model_copy(update=results)

    def check(self, report: Report) -> None:
        """Rules of several keys."""
        size = self.tensor_parallel.tp_size
        if self.mp_size and size and self.mp_size != size:
            text = f"tensor_parallel.tp_size is {size}; leave mp_size, its old name, out"
            report.complain("mp_size", self.mp_size, text)
        experts = self.moe.ep_size
        if self.ep_size is not None and "ep_size" in self.moe.model_fields_set:
            if self.ep_size != experts:
                report.complain("ep_size", self.ep_size, f"moe.ep_size is {experts}; leave one out")
        if self.dtype == "int8" and not (self.quant.enabled and self.quant.weight.enabled):
            report.complain(
                "dtype", "int8", "quant is not enabled; enable it, or take another dtype"
            )
        if self.enable_cuda_graph and self.num_slices > 1:
            text = f"not with layers in {self.num_slices} slices, whose ranks send; set it to false"
            report.complain("enable_cuda_graph", True, text)
        is_given = "max_out_tokens" in self.model_fields_set
        if is_given and self.min_out_tokens > self.max_out_tokens:
            text = f"max_out_tokens is {self.max_out_tokens}; set it to that or less"
            report.complain("min_out_tokens", self.min_out_tokens, text)
        self._check_slices(report)

    def _check_slices(self, report: Report) -> None:
        section, policy = self.tensor_parallel, self.injection_policy
        mpu = section.mpu or self.mpu
        if mpu is not None and not hasattr(mpu, "get_model_parallel_group"):
            need = "must be an object with get_model_parallel_group(), or null"
            report.complain("mpu", mpu, need)
        if section.tp_group is not None and not hasattr(section.tp_group, "size"):
            need = "must be a group of torch.distributed, or null"
            report.complain("tensor_parallel.tp_group", section.tp_group, need)
        if policy is not None and not isinstance(policy, Mapping):
            need = 'must be a dict {LayerClass: ("attention.output", ...)}'
            report.complain("injection_policy", policy, need)
        elif policy and section.plan is not None:
            need = "tensor_parallel.plan says how layers are cut; leave one of them out"
            report.complain("injection_policy", policy, need)

    @property
    def num_slices(self) -> int:
        """The ranks that share a layer, where no mpu and no tp_group says it."""
        return (
            self.tensor_parallel.tp_size or self.mp_size or 1
        ) * self.tensor_parallel.enabled or 1

    @property
    def num_expert_ranks(self) -> int:
        """The ranks that share the experts of a layer."""
        return (self.ep_size or self.moe.ep_size) if self.moe.enabled else 1

    @property
    def checkpoint_source(self) -> Any:
        """What `checkpoint` or `checkpoint_config` name."""
        return self.checkpoint or self.checkpoint_config.checkpoint_dir

    @property
    def folder(self) -> str:
        """The folder of relative files."""
        return self.base_dir or self.checkpoint_config.base_dir or ""

    @property
    def save_path(self) -> str | None:
        """Where whole weights are described for a later start."""
        return self.save_mp_checkpoint_path or self.checkpoint_config.save_mp_checkpoint_path

    def _read_groups(self, report: Report) -> dict[str, GroupQuant]:
        weight = self.quant.weight
        named = {
            key: (f"post_init_quant.{key}", one) for key, one in weight.post_init_quant.items()
        }
        if weight.quantized_initialization:
            named[""] = "quantized_initialization", weight.quantized_initialization
        found = {}
        for key, (path, value) in named.items():
            read = read_section(GroupQuant, value, f"quant.weight.{path}", report)
            if read is not None:
                found[key] = read
        if not (self.quant.enabled and weight.enabled):
            return {}
        if not named and (self.dtype == "int8" or "num_bits" in weight.model_fields_set):
            groups = weight.q_groups if "q_groups" in weight.model_fields_set else 0
            values = {"num_bits": weight.num_bits, "symmetric": weight.q_type == "symmetric"}
            found[""] = GroupQuant.model_validate({**values, "num_groups": groups})
        return found


def _as_given(value: Any) -> Any:
    """What a section was read from."""
    if isinstance(value, Section):
        names = value.model_fields_set - value.results
        return {name: _as_given(getattr(value, name)) for name in names}
    return value


def _plain(value: Any) -> str:
    """Equal for two names of one dtype."""
    return _NAMES.get(str(value).casefold(), str(value))


def _merged(values: dict[str, Any], given: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """`values` and keywords; a keyword of None is not given."""
    names = {InferenceConfig.aliases.get(key, key): key for key in values}
    merged = dict(values)
    for key, value in given.items():
        other = names.get(InferenceConfig.aliases.get(key, key))
        if other is None:
            merged[key] = value
        elif value is not None and _plain(value) != _plain(values[other]):
            report.complain(
                key, value, f"the config has {other} = {values[other]!r}; give one of them"
            )
    return merged


__all__ = ["GroupQuant", "InferenceConfig"]
