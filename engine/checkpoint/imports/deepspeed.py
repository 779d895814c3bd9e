"""Reads a checkpoint of DeepSpeed: ZeRO stage 0 to 3, any number of data-parallel ranks.

    mp_rank_00_model_states.pt                            stages 0 to 2: values, names, counters
    zero_pp_rank_{r}_mp_rank_00_model_states.pt           stage 3: the same; frozen parameters in parts
    [bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt    stages 1 to 3: masters, states, loss scale

Master weights and optimizer states of stages 1 to 3 are imported bit for bit. Those of stage 0 have numbers and
no names, so its weights are imported. DeepSpeed saves no random generators and no data position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....ops.flat import numel_of
from ....utils.errors import UsageError
from ....zero.checkpoint.ranges import ConstantRange
from ....zero.checkpoint.snapshot import name_of
from ..hyperparameters import check_groups
from ..io.folders import MANIFEST
from .deepspeed_shards import STEP, Held, Training, read_shards
from .deepspeed_values import (
    client_values,
    group_values,
    loss_scale,
    optimizer_type,
    scheduler_state,
)
from .imported import Imported, counters
from .safe_pickle import read_pickle

Named = dict[str, Any]
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
REFUSED_FILES = (
    (r"layer_\d+-.*", "it was written by a pipeline"),
    (r".*expert_\d+.*|expp_rank_.*", "it has experts (mixture of experts)"),
    (
        r"zero|latest_universal",
        "ds_to_universal wrote it; import the checkpoint that it was made from",
    ),
    (r"offloaded_tensors", "its optimizer states were on NVMe"),
)


def is_deepspeed(folder: Path) -> bool:
    """Whether `folder` is one tag of a DeepSpeed checkpoint; one of xds may have such a file as well."""
    is_own = (folder / MANIFEST).exists()
    return folder.is_dir() and not is_own and any(folder.glob("*_model_states.pt"))


def read_deepspeed(folder: Path) -> Imported:
    """The checkpoint in `folder`, the folder of one tag; its tensors stay in the files.

    Raises:
        UsageError: files are missing or damaged, name code to execute, or have an unsupported layout
            (tensor, pipeline or expert parallel, NVMe); the message gives the reason.
    """
    model_files, optim_files = _files(folder)
    models = [read_pickle(path) for path in model_files]
    first = models[0]
    _check_layout(first, folder)
    if not isinstance(first.get("ds_config"), dict):
        first["ds_config"] = {}
    version = first.get("ds_version")
    training = _training(folder, first, optim_files)
    found = Imported(
        f"DeepSpeed {version if isinstance(version, str) else ''}".strip(),
        folder.name,
        training.stage if training is not None else 0,
    )
    names = _all_names(first)
    keys = _add_trained(found, first, training, names)
    _add_frozen(found, folder, models, training, names)
    for name in _buffers(first):
        found.add_whole("buffer", [name], first["module"][name])
    _set_values(found, folder, first, training, keys)
    return found


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Model and optimizer files, by rank."""
    model: dict[int, Path] = {}
    optim: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        for refused, reason in REFUSED_FILES:
            if re.fullmatch(refused, path.name):
                raise UsageError(f"{folder} cannot be imported: {reason} ({path.name})")
        for pattern, by_rank in ((MODEL_FILE, model), (OPTIM_FILE, optim)):
            match = pattern.fullmatch(path.name)
            if match and int(match[2]):
                raise UsageError(
                    f"{folder} cannot be imported: it was written by several tensor-parallel ranks "
                    f"({path.name}), and the files do not show how parameters are split; save it there with one"
                )
            if match:
                by_rank[int(match[1] or 0)] = path
    for kind, there, needed in (("model", model, 1), ("optimizer", optim, 0)):
        missing = [rank for rank in range(max(there, default=needed - 1) + 1) if rank not in there]
        if missing:
            raise UsageError(
                f"{folder} is not complete: the {kind} states of rank {missing[0]} are missing"
            )
    return [model[rank] for rank in sorted(model)], [optim[rank] for rank in sorted(optim)]


def _check_layout(state: Any, folder: Path) -> None:
    if not isinstance(state, dict) or not isinstance(state.get("module"), dict):
        raise UsageError(f"{folder} cannot be imported: its model states have no 'module'")
    parallel = state.get("checkpoint_parallel_dimensions") or {}
    for what, size in (
        ("tensor-parallel", state.get("mp_world_size")),
        ("tensor-parallel", parallel.get("tp_degree")),
        ("pipeline", parallel.get("pp_degree")),
    ):
        if size is not None and size != 1:
            raise UsageError(f"{folder} cannot be imported: it was written by {size} {what} ranks")


def _buffers(state: Named) -> list[str]:
    return [name for name in state.get("buffer_names") or [] if name in state["module"]]


def _aliases(state: Named) -> dict[str, str]:
    """Other name -> name of tied parameters: those that DeepSpeed recorded, and tensors that share memory."""
    aliases: dict[str, str] = dict(state.get("shared_params") or {})
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, value in state["module"].items():
        if isinstance(value, Tensor) and value.numel() and name not in aliases:
            first = seen.setdefault((value.data_ptr(), tuple(value.shape)), name)
            if first != name:
                aliases[name] = first
    return aliases


def _all_names(state: Named) -> dict[str, list[str]]:
    """All names of every tensor of the model, by its first name; that name comes first."""
    aliases = _aliases(state)
    names = {name: [name] for name in state["module"] if name not in aliases}
    for other, first in aliases.items():
        names.setdefault(first, [first]).append(other)
    return names


# -- what is trained ----------------------------------------------------------------------------------------


def _training(folder: Path, state: Named, optim_files: Sequence[Path]) -> Training | None:
    if optim_files:
        return read_shards(folder, state, optim_files)
    if state.get("param_shapes") is not None:
        raise UsageError(
            f"{folder} is not complete: there are no optimizer states (*_optim_states.pt)"
        )
    return None


def _add_trained(
    found: Imported, state: Named, training: Training | None, names: Mapping[str, list[str]]
) -> set[str]:
    """Flats, masters and states of every trained parameter; the keys of the states."""
    keys: set[str] = set()
    # an optimizer of xds keeps its step on the device of the masters, torch's on the CPU
    on_device = isinstance(state["ds_config"].get("optimizer"), dict)
    for one in () if training is None else training.trained:
        value = state["module"].get(one.name)
        dtype = value.dtype if isinstance(value, Tensor) else torch.float32
        flat = found.add_flat(
            "param",
            names.get(one.name, [one.name]),
            one.shape,
            name_of(dtype),
            trains=True,
            group=one.group,
        )
        for held in one.held:
            found.add_range(flat, "value", held.start, held.master)
            for key, state_value in held.states.items():
                if _add_state(found, flat, key, held, state_value, on_device=on_device):
                    keys.add(key)
    return keys


def _add_state(
    found: Imported, flat: int, key: str, held: Held, value: Any, *, on_device: bool
) -> bool:
    """Add one state of a range: a tensor of its elements, or one number for all. False: not possible."""
    numel = held.master.numel()
    if isinstance(value, Tensor) and value.ndim == 1 and value.numel() == numel and key != STEP:
        found.add_range(flat, f"state/{key}", held.start, value)
        return True
    dtype: str | None = None
    if isinstance(value, Tensor) and value.numel() == 1:
        dtype, value = name_of(value.dtype), value.item()
    if not isinstance(value, bool | int | float | str):
        found.note(f"the optimizer state {key!r} is not per element: left out, it starts from zero")
        return False
    if (
        key == STEP
    ):  # a number in some of DeepSpeed's optimizers; a tensor in torch's and in those of xds
        dtype, value = "float32", float(value)
    start, stop = held.start, held.start + numel
    one = ConstantRange(flat, f"state/{key}", start, stop, value, dtype, on_device)
    found.add_constant(one)
    return True


# -- frozen parameters and values ---------------------------------------------------------------------------


def _add_frozen(
    found: Imported,
    folder: Path,
    models: Sequence[Named],
    training: Training | None,
    names: Mapping[str, list[str]],
) -> None:
    """Add frozen parameters: whole at stages 0 to 2, in parts at stage 3."""
    first = models[0]
    if training is not None and training.stage == 3:
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
            _add_parts(found, folder, names.get(name, [name]), tuple(shape), parts)
        return
    trained = () if training is None else (one.name for one in training.trained)
    left_out = {*trained, *_buffers(first)}
    for name, all_names in names.items():
        value = first["module"].get(name)
        if name in left_out:
            continue
        if isinstance(value, Tensor):
            found.add_whole("param", all_names, value)
        else:
            found.note(f"{name} in the model's state is not a tensor: left out")


def _add_parts(
    found: Imported, folder: Path, names: list[str], shape: tuple[int, ...], parts: Sequence[Tensor]
) -> None:
    flat = found.add_flat("param", names, shape, name_of(parts[0].dtype))
    at, numel = 0, numel_of(shape)
    for part in parts:
        here = part[: numel - at]  # the last one is padded
        found.add_range(flat, "value", at, here)
        at += here.numel()
    if at != numel:
        raise UsageError(
            f"{folder} is not complete: there are {at} of {numel} elements of {names[0]}"
        )


def _set_values(
    found: Imported,
    folder: Path,
    state: Named,
    training: Training | None,
    keys: set[str],
) -> None:
    config: Mapping[str, Any] = state["ds_config"]
    steps, skipped, samples = (
        int(state.get(what) or 0) for what in ("global_steps", "skipped_steps", "global_samples")
    )
    accumulation = _accumulation_steps(state, config)
    found.set_state("counters", counters(steps, skipped, samples, accumulation))
    raw = state.get("optimizer") if training is None else training.raw
    found.set_state("loss_scale", loss_scale(raw, config))
    kind = optimizer_type(config, keys)
    if training is None and isinstance(raw, dict):
        found.note(
            "at stage 0 DeepSpeed saves optimizer states without names of parameters: they start from zero, "
            "and masters from the model's weights; to keep them, save there with zero_optimization.stage 1"
        )
    elif training is None:
        found.note("there is no optimizer in it: optimizer states start from zero")
    elif kind is None:
        raise UsageError(
            f"{folder} cannot be imported: its config names no optimizer, and none is known with the states "
            f"{', '.join(sorted(keys)) or '(there are none)'}; import only the weights: zero_to_fp32 there, "
            "then --from torch here"
        )
    else:
        groups = [
            found.storable(group_values(group), "hyperparameter") for group in training.groups
        ]
        found.set_state("optimizer", {"type": kind, "groups": groups})
        try:
            check_groups(kind, groups)
        except ValueError as error:
            found.note(f"{error}: a load will need load_optimizer_states=False")
    scheduler = scheduler_state(found, state.get("lr_scheduler"), config)
    found.set_state("lr_scheduler", scheduler)
    found.set_state("client_state", client_values(found, state))
    found.note(
        "DeepSpeed saves no random generators and no data position: they start from the beginning"
    )


def _accumulation_steps(state: Named, config: Mapping[str, Any]) -> int:
    steps = config.get("gradient_accumulation_steps")
    if isinstance(steps, int):
        return max(steps, 1)
    total, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    ranks = state.get("dp_world_size")
    if isinstance(total, int) and isinstance(micro, int) and isinstance(ranks, int):
        return max(total // max(micro * ranks, 1), 1)
    return 1
