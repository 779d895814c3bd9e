"""The config section `compile`: torch.compile for each of the model's blocks. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, final

from pydantic import AfterValidator, Field

from ...utils.schema.section import Entry, Refused, Report, Section, details
from ...utils.schema.values import (
    ANY_CASE,
    FLAG,
    OBJECT,
    Flag,
    Items,
    Natural,
    Object,
    Value,
    needs,
)
from ...zero.config import ZeroConfig

INDUCTOR = "inductor"
_DEFAULT_MODE = "default"  # torch's name for "no mode"
_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # on a GPU they record CUDA graphs
Mode = Annotated[
    Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], ANY_CASE
]
_ARGUMENTS = {
    "mode": Value(Mode | None),
    "dynamic": Value(Flag | None),
    "fullgraph": FLAG,
    "options": OBJECT,
}
_KWARGS = f"an object with arguments of torch.compile ({', '.join(_ARGUMENTS)})"


def _read_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given) - set(_ARGUMENTS))
    if unknown:
        raise ValueError(f"must be {_KWARGS}; {unknown[0]} is not one of them")
    read = {}
    for name, inner in given.items():
        try:
            read[name] = _ARGUMENTS[name].read(inner)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return read


class Neighbours(Protocol):
    """What the rules of this section read of the rest of the config."""

    @property
    def zero_optimization(self) -> ZeroConfig: ...


@final
class Compile(Section):
    """torch.compile of each block of the model, in place; a model without blocks is compiled as a whole."""

    others: ClassVar[Mapping[str, Entry]] = {
        "deepcompile": Refused(
            Flag,
            "DeepCompile is not supported yet; set it to false and compile.enabled to true",
            harmless=(False,),
        ),
        "disable": Refused(
            Flag, "DeepSpeed 0.19 has no such key; set compile.enabled to true", harmless=(True,)
        ),
        **details(
            Flag,
            "autoep_non_moe free_activation offload_activation double_buffer "
            "offload_activation_pin_memory offload_opt_states offload_parameters "
            "symmetric_memory debug_log sync_before_reduce sync_after_reduce "
            "sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors",
        ),
        **details(Natural, "free_activation_threshold"),
        **details(Items, "passes"),
    }

    enabled: Flag = Field(False, description="the forward of each block is compiled")
    backend: str = Field(INDUCTOR, description="a backend of torch.compile, by name")
    mode: Mode | None = Field(
        None, description="torch.compile's mode; only for the backend inductor"
    )
    dynamic: Flag | None = Field(
        None, description="true compiles for any shape, false for each shape; null: torch decides"
    )
    fullgraph: Flag = Field(False, description="a block that is not a single graph is an error")
    kwargs: Annotated[Object, needs(_KWARGS), AfterValidator(_read_kwargs)] = Field(
        default_factory=dict,
        description="further arguments of torch.compile, as in DeepSpeed",
    )

    def arguments(self) -> dict[str, Any]:
        """The arguments of torch.compile besides the backend that differ from its defaults."""
        own = {"mode": self.mode, "dynamic": self.dynamic, "fullgraph": self.fullgraph or None}
        merged = {**{k: v for k, v in own.items() if v is not None}, **self.kwargs}
        plain = {"mode": (None, _DEFAULT_MODE), "dynamic": (None,), "fullgraph": (False,)}
        return {k: v for k, v in merged.items() if v not in plain.get(k, ({},))}

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`; nothing if the section is disabled."""
        self.check(config.zero_optimization.stage, report)

    def check(self, stage: int, report: Report, path: str = "compile") -> None:
        """The same at the ZeRO stage `stage`, for a section at `path`."""
        if not self.enabled:
            return
        for name in self.kwargs:
            if name != "options" and getattr(self, name):
                report.complain(
                    f"{path}.kwargs.{name}",
                    self.kwargs[name],
                    f"repeats {path}.{name}: remove one of the two",
                )
        arguments = self.arguments()
        mode = arguments.get("mode")
        if mode is not None and "options" in arguments:
            report.complain(f"{path}.mode", mode, "torch.compile takes a mode or options, not both")
        if mode is not None and self.backend != INDUCTOR:
            report.complain(
                f"{path}.mode",
                mode,
                f'is only for the backend "{INDUCTOR}", but {path}.backend = "{self.backend}"; remove one',
            )
        recorder = _records_graphs(self.backend, arguments)
        if recorder is not None and stage == 3:
            where, value = recorder
            report.complain(
                f"{path}.{where}",
                value,
                "records CUDA graphs, which need parameters at fixed addresses, but stage 3 gathers them for "
                'each use; use "max-autotune-no-cudagraphs" or a lower stage',
            )


def _records_graphs(backend: str, arguments: Mapping[str, Any]) -> tuple[str, object] | None:
    """The key, with its value, that makes a GPU record graphs."""
    if backend == "cudagraphs":
        return "backend", backend
    if arguments.get("mode") in _GRAPH_MODES:
        return "mode", arguments["mode"]
    if arguments.get("options", {}).get("triton.cudagraphs"):
        return "kwargs.options", arguments["options"]
    return None
