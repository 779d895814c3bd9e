"""The config section `compile`: torch.compile for each of the model's blocks. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from ...utils.schema.keys import Detail, Entry, Refused, Report, details
from ...utils.schema.rules import FLAG, LIST, NULL, OBJECT, TEXT, Rule, either, one_of, whole
from ...utils.schema.section import Section

Flag = Annotated[bool, FLAG]

INDUCTOR = "inductor"
_DEFAULT_MODE = "default"  # torch's name for "no mode"
_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # on a GPU they record CUDA graphs
_MODE = either(
    one_of(_DEFAULT_MODE, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"), NULL
)
_DYNAMIC = either(FLAG, NULL)
_ARGUMENTS = {"mode": _MODE, "dynamic": _DYNAMIC, "fullgraph": FLAG, "options": OBJECT}


def _read_kwargs(value: object) -> dict[str, Any]:
    found: dict[str, Any] = OBJECT.read(value)
    unknown = sorted(set(found) - set(_ARGUMENTS))
    if unknown:
        raise ValueError(f"must be {_KWARGS.need}; {unknown[0]} is not one of them")
    read = {}
    for name, inner in found.items():
        try:
            read[name] = _ARGUMENTS[name].read(inner)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return read


_KWARGS = Rule(f"an object with arguments of torch.compile ({', '.join(_ARGUMENTS)})", _read_kwargs)


@final
class Compile(Section):
    """torch.compile of each block of the model, in place; a model without blocks is compiled as a whole."""

    others: ClassVar[Mapping[str, Entry]] = {
        "deepcompile": Refused(
            FLAG,
            "DeepCompile is not supported yet; set it to false and compile.enabled to true",
            harmless=(False,),
        ),
        "disable": Refused(
            FLAG, "DeepSpeed 0.19 has no such key; set compile.enabled to true", harmless=(True,)
        ),
        **details(
            FLAG,
            *("autoep_non_moe", "free_activation", "offload_activation", "double_buffer"),
            *("offload_activation_pin_memory", "offload_opt_states", "offload_parameters"),
            *("symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce"),
            *("sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors"),
            "keep_all_input_tensors",
        ),
        "free_activation_threshold": Detail(whole(0)),
        "passes": Detail(LIST),
    }

    enabled: Flag = Field(False, description="the forward of each block is compiled")
    backend: Annotated[str, TEXT] = Field(
        INDUCTOR, description="a backend of torch.compile, by name"
    )
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
        _MODE,
    ] = Field(None, description="torch.compile's mode; only for the backend inductor")
    dynamic: Annotated[bool | None, _DYNAMIC] = Field(
        None, description="true compiles for any shape, false for each shape; null: torch decides"
    )
    fullgraph: Flag = Field(False, description="a block that is not a single graph is an error")
    kwargs: Annotated[dict[str, Any], _KWARGS] = Field(
        default_factory=dict,
        description="further arguments of torch.compile, as in DeepSpeed",
    )

    def arguments(self) -> dict[str, Any]:
        """The arguments of torch.compile besides the backend that differ from its defaults."""
        own = {"mode": self.mode, "dynamic": self.dynamic, "fullgraph": self.fullgraph or None}
        merged = {**{k: v for k, v in own.items() if v is not None}, **self.kwargs}
        plain = {"mode": (None, _DEFAULT_MODE), "dynamic": (None,), "fullgraph": (False,)}
        return {k: v for k, v in merged.items() if v not in plain.get(k, ({},))}


def check_compile(section: Compile, stage: int, report: Report, path: str = "compile") -> None:
    """Check keys that depend on one another or on the ZeRO stage; nothing if the section is disabled."""
    if not section.enabled:
        return
    for name in section.kwargs:
        if name != "options" and getattr(section, name):
            report.complain(
                f"{path}.kwargs.{name}",
                section.kwargs[name],
                f"repeats {path}.{name}: remove one of the two",
            )
    arguments = section.arguments()
    mode = arguments.get("mode")
    if mode is not None and "options" in arguments:
        report.complain(f"{path}.mode", mode, "torch.compile takes a mode or options, not both")
    if mode is not None and section.backend != INDUCTOR:
        report.complain(
            f"{path}.mode",
            mode,
            f'is only for the backend "{INDUCTOR}", but {path}.backend = "{section.backend}"; remove one',
        )
    recorder = _records_graphs(section.backend, arguments)
    if recorder is not None and stage == 3:
        where, value = recorder
        report.complain(
            f"{path}.{where}",
            value,
            "records CUDA graphs, which need parameters at fixed addresses, but stage 3 gathers them for each "
            'use; use "max-autotune-no-cudagraphs" or a lower stage',
        )


def _records_graphs(backend: str, arguments: Mapping[str, Any]) -> tuple[str, object] | None:
    """The key, with its value, that makes a GPU record CUDA graphs."""
    if backend == "cudagraphs":
        return "backend", backend
    if arguments.get("mode") in _GRAPH_MODES:
        return "mode", arguments["mode"]
    if arguments.get("options", {}).get("triton.cudagraphs"):
        return "kwargs.options", arguments["options"]
    return None
