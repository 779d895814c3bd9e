"""Converts DeepSpeed's values besides tensors: loss scale, hyperparameters, schedule, client state."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from .imported import Imported
from .safe_pickle import StandIn

# keys of the model states that are DeepSpeed's own; all others are the client's
RESERVED = {
    *(
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
    ),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *(
        "sparse_tensor_module_names",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
    ),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
    *("ds_autoep_layers", "autoep_layers", "num_experts", "folding"),
}
NOT_READ = {"data_sampler": "curriculum data sampler", "random_ltd": "random layer token drop"}

# implementation choices, not hyperparameters; false values change nothing
IMPLEMENTATION = {
    *("params", "step", "foreach", "capturable", "differentiable", "fused", "param_names"),
    "decoupled_weight_decay",
}
SWITCHES = {"amsgrad", "maximize", "nesterov", "centered"}
TYPES = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"), "Adam"),
    **dict.fromkeys(("lamb", "fusedlamb"), "Lamb"),
    **dict.fromkeys(("lion", "fusedlion", "cpulion"), "Lion"),
    **{"muon": "Muon", "adagrad": "Adagrad", "sgd": "SGD"},
}
TYPES_BY_STATES = (
    ({"exp_avg", "exp_avg_sq"}, "Adam"),
    ({"exp_avg"}, "Lion"),
    ({"momentum_buffer"}, "SGD"),
    ({"sum"}, "Adagrad"),
    ({"square_avg"}, "RMSprop"),
)
# a schedule's state does not contain its class; these keys identify it
SCHEDULES_BY_KEYS = (
    ("lr_lambdas", "LambdaLR"),
    ("T_mult", "CosineAnnealingWarmRestarts"),
    ("T_max", "CosineAnnealingLR"),
    ("_anneal_func_type", "OneCycleLR"),
    ("step_size", "StepLR"),
    ("milestones", "MultiStepLR"),
    ("start_factor", "LinearLR"),
    ("power", "PolynomialLR"),
    ("gamma", "ExponentialLR"),
)


def loss_scale(raw: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """The dynamic loss scale of fp16; empty where there is none."""
    if not isinstance(raw, dict) or not raw.get("dynamic_loss_scale"):
        return {}
    scaler = raw.get("loss_scaler")
    fields = scaler.fields if isinstance(scaler, StandIn) else raw  # stage 0 has them beside
    if not isinstance(fields, dict) or "cur_scale" not in fields:
        return {}
    fp16: Any = config.get("fp16") or {}
    hysteresis = fp16.get("hysteresis", 2)  # stage 0 does not save what is left of it
    return {
        "value": float(fields["cur_scale"]),
        "left": int(fields.get("cur_hysteresis", hysteresis)),
        "step": int(fields.get("cur_iter", 0)),
        "last_overflow": int(fields.get("last_overflow_iter", -1)),
    }


def optimizer_type(config: Mapping[str, Any], keys: Set[str]) -> str | None:
    """The name of the optimizer in xds, from the config or from its states."""
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    if isinstance(name, str):
        return TYPES.get(name.lower(), name)
    for states, kind in TYPES_BY_STATES:
        if states <= keys:
            return kind
    return None


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in IMPLEMENTATION and not (key in SWITCHES and not value)
    }


def scheduler_state(
    found: Imported, state: Any, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The schedule's type and state, if the type can be determined."""
    if not isinstance(state, dict):
        return None
    section = config.get("scheduler")
    kind = section.get("type") if isinstance(section, dict) else None
    if kind is None:
        kind = next((name for key, name in SCHEDULES_BY_KEYS if key in state), None)
    if kind is None:
        found.note(
            f"the class of the lr schedule (keys {', '.join(map(str, state))}) is not known: it starts "
            "from the beginning"
        )
        return None
    return {"type": kind, "state": found.storable(state, "of the lr schedule")}


def client_values(found: Imported, state: Mapping[str, Any]) -> dict[str, Any]:
    """The user's client_state of save_checkpoint, restricted to JSON values and tensors."""
    for key, what in NOT_READ.items():
        if state.get(key) is not None:
            found.note(f"the state of the {what} is left out: xds has none")
    mine = {key: value for key, value in state.items() if key not in RESERVED}
    return found.storable(mine, "client state")
