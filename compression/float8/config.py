"""The section float8: which linear layers multiply matrices in 8 bits, and how these are scaled."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, final

from pydantic import AfterValidator, BeforeValidator, Field

from ...utils.patterns import check_expression
from ...utils.schema.section import Report, Section, is_auto
from ...utils.schema.values import Flag, needs

AUTO = "auto"
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
        return AUTO
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
