"""The compression keys of the config: 1-bit optimizers, LoCo, float8, and those that no section has."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, final

from pydantic import AfterValidator, BeforeValidator, Field

from ..utils.patterns import check_expression
from ..utils.schema.section import Entry, Group, NoEffect, Report, Section, details, is_auto
from ..utils.schema.values import Count, Flag, Natural, Number, Share, Text, needs
from .training.config import EIGENVALUE

ONE_BIT_OPTIMIZERS = ("OneBitAdam", "OneBitLamb")


@final
class Loco(Section):
    """Feeds back what 4-bit gradients lose: zeropp_loco_param."""

    err_beta: Share = Field(
        0.8,
        description="the weight of the earlier error in the running mean; 0 keeps the last error only",
    )
    reset_T: Count = Field(  # noqa: N815 (DeepSpeed's name)
        1024, description="steps after which the error is set to 0"
    )


Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
_RECIPES = '"tensorwise", "rowwise" or "rowwise_with_gw_hp"'
_FILTER = (
    '"auto", or a list of regular expressions that find names of layers, e.g. ["mlp", "q_proj$"]'
)


def _read_recipe(value: object) -> object:
    if isinstance(value, str) and value.casefold().startswith(("mx", "nvfp4")):
        raise ValueError(
            f"must be {_RECIPES}: formats with a scale for each block (MX, NVFP4) need a Blackwell GPU and a "
            "prototype of torchao, and are not supported yet"
        )
    return value.casefold() if isinstance(value, str) else value


def _read_filter(value: object) -> object:
    if is_auto(value):
        return "auto"
    return tuple(value) if isinstance(value, list) else value


def _check_filter(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if value == ():
        raise ValueError
    for text in () if isinstance(value, str) else value:
        try:
            check_expression(text)
        except ValueError as error:
            raise ValueError(f'must be {_FILTER}; "{text}" {error}') from None
    return value


class Neighbours(Protocol):
    """What the rules of this section read of others."""

    @property
    def tensor_ranks(self) -> int: ...


@final
class Float8(Section):
    """Linear layers cast inputs, weights and gradients to 8 bits before they multiply; needs torchao."""

    enabled: Flag = Field(False, description="linear layers multiply in 8 bits")
    recipe: Annotated[
        Recipe, needs(_RECIPES), BeforeValidator(_read_recipe, json_schema_input_type=str)
    ] = Field(
        "tensorwise",
        description="what has a scale of its own: a tensor, or each row of it; with_gw_hp: gradients of "
        "weights are multiplied in the precision of the parameters",
    )
    filter: Annotated[
        Literal["auto"] | Annotated[tuple[str, ...], Field(fail_fast=True)],
        needs(_FILTER),
        BeforeValidator(_read_filter),
        AfterValidator(_check_filter),
    ] = Field(
        "auto",
        description='the layers that multiply in 8 bits, by their names. "auto": all but the head and those '
        "that are too small to gain",
    )

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`."""
        if self.enabled and config.tensor_ranks > 1:
            report.complain(
                "float8.enabled",
                True,
                f"does not work with tensor_parallel.tp_size = {config.tensor_ranks}: the slices of a weight "
                "would have scales of their own; remove one of the two",
            )


TOP_LEVEL_KEYS: dict[str, Entry] = {
    "eigenvalue": Group(
        "curvature of the layers, for quantize_training",
        {"enabled": NoEffect(Flag, EIGENVALUE, same=(False,))},
        details(Flag, "verbose"),
        details(Number, "tol stability"),
        details(Natural, "max_iter gas_boundary_resolution layer_num"),
        details(Text, "layer_name model_name"),
    ),
    "weight_quantization": Group(
        "quantised weights for inference",
        details(Any, "enabled quantized_initialization post_init_quant"),
        present="only xds.init_inference stores weights so: let its key quant.weight be this section",
    ),
}
