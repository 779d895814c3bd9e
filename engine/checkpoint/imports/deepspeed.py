"""Reads a checkpoint of DeepSpeed: ZeRO stage 0 to 3, any number of data-parallel ranks.

    mp_rank_00_model_states.pt                            stages 0 to 2: values, names, counters
    zero_pp_rank_{r}_mp_rank_00_model_states.pt           stage 3: the same; frozen parameters in parts
    [bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt    stages 1 to 3: masters, states, loss scale
    layer_{l}_expert_{e}_mp_rank_00_model_states.pt       values of one expert of a layer `MoE`

ZeRO 1, 2   a group's parameters in one row, the row divided into equal parts, one per rank
            row      |--- a ---|- b -|.|-------- c --------|..|       . = alignment
            ranks    |------- 0 -------|-------- 1 -----------|
            a group of experts: a row for each rank of experts, over the ranks that have the same ones
ZeRO 3      every parameter divided into equal parts; a rank has its parts in one row over all sub-groups
            rank 0   | a0 | b0 | c0 |       rank 1   | a1 | b1 | c1.|

Master weights and optimizer states of stages 1 to 3 are imported bit for bit. Those of stage 0 have numbers and
no names, so its weights are imported. DeepSpeed saves no random generators and no data position.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ....ops.flat import numel_of
from ....ops.optim.config import REGISTERED
from ....ops.weights.safe_pickle import UnpickledObject, read_pickle
from ....ops.weights.tensor_table import shown
from ....utils.errors import UsageError
from ....zero.checkpoint.ranges import ConstantRange
from ....zero.checkpoint.snapshot import name_of
from ..hyperparameters import check_groups
from ..io.folders import MANIFEST
from .imported import Imported

Named = dict[str, Any]
Shape = tuple[int, ...]
MODEL_FILE = r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt"
OPTIM_FILE = r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
EXPERT_FILE = r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt"
EXPERT = r"(.*\.deepspeed_experts\.)(\d+)(\..*)"  # a parameter: its layer, the expert, the rest
REFUSED_FILES = {
    r"layer_\d+-.*": "it was written by a pipeline",
    r"zero|latest_universal": "ds_to_universal wrote it; import the checkpoint that it was made from",
    r"offloaded_tensors": "its optimizer states were on NVMe",
}
FP32_ROWS, FP32_PARTS = "single_partition_of_fp32_groups", "fp32_flat_groups"
STEP = "step"
ALIGNMENT = 2  # ZeRO 1 and 2 pad a group to a multiple of so many elements per rank

# keys of the model states that are DeepSpeed's own; all others are the client's
RESERVED = set(
    """module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments
    lr_scheduler data_sampler random_ltd skipped_steps sparse_tensor_module_names global_steps global_samples
    dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info
    ds_autoep_layers autoep_layers num_experts folding""".split()
)
NOT_READ = {"data_sampler": "curriculum data sampler", "random_ltd": "random layer token drop"}
# implementation choices, not hyperparameters; false values change nothing
IMPLEMENTATION = set(
    "params step foreach capturable differentiable fused param_names decoupled_weight_decay".split()
)
SWITCHES = {"amsgrad", "maximize", "nesterov", "centered"}
TYPES = {
    alias.lower(): each.class_name
    for name, each in REGISTERED.items()
    for alias in (name, *each.aliases)
}
TYPES_BY_STATES = (
    *((each.states, each.class_name) for each in REGISTERED.values() if each.states),
    (frozenset(("square_avg",)), "RMSprop"),
)
# a schedule's state does not contain its class; the first of these keys identifies it
SCHEDULES_BY_KEYS = {
    "lr_lambdas": "LambdaLR",
    "T_mult": "CosineAnnealingWarmRestarts",
    "T_max": "CosineAnnealingLR",
    "_anneal_func_type": "OneCycleLR",
    "step_size": "StepLR",
    "milestones": "MultiStepLR",
    "start_factor": "LinearLR",
    "power": "PolynomialLR",
    "gamma": "ExponentialLR",
}


def is_deepspeed(folder: Path) -> bool:
    """Whether `folder` is one tag of a DeepSpeed checkpoint; one of xds may have such a file as well."""
    is_own = (folder / MANIFEST).exists()
    return folder.is_dir() and not is_own and any(folder.glob("*_model_states.pt"))


def read_deepspeed(folder: Path) -> Imported:
    """The checkpoint in `folder`, the folder of one tag; its tensors stay in the files.

    Raises:
        UsageError: files are missing or damaged, name code to execute, or have an unsupported layout
            (tensor or pipeline parallel, AutoEP, NVMe); the message gives the reason.
        Other exceptions: a value does not have DeepSpeed's form.
    """
    source = _Source(folder)
    source.add_tensors()
    source.set_values()
    return source.imported


# A tensor for a list or a number may have any number of elements. So it is never iterated or compared.


def _list(value: Any) -> Sequence[Any]:
    if value is not None and not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__} stands where a list belongs")
    return value or ()


def _table(value: Any) -> Mapping[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} stands where a table belongs")
    return value or {}


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Model and optimizer files, by rank."""
    model: dict[int, Path] = {}
    optim: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        for refused, reason in REFUSED_FILES.items():
            if re.fullmatch(refused, path.name):
                raise UsageError(f"{folder} cannot be imported: {reason} ({path.name})")
        for pattern, by_rank in ((MODEL_FILE, model), (OPTIM_FILE, optim)):
            match = re.fullmatch(pattern, path.name)
            if match and int(match[2]):
                raise UsageError(
                    f"{folder} cannot be imported: it was written by several tensor-parallel ranks "
                    f"({path.name}), and the files do not show how parameters are split; save it there with one"
                )
            other = by_rank.setdefault(int(match[1] or 0), path) if match else path
            if other != path:
                raise UsageError(
                    f"{folder} contradicts itself: {other.name} and {path.name} are of one rank; remove the "
                    "one of an older save"
                )
    return _in_order(folder, "model", model, 1), _in_order(folder, "optimizer", optim, 0)


def _experts(folder: Path) -> dict[str, Tensor]:
    """The values of all experts of layers `MoE`, by their names in the whole model."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(EXPERT_FILE, path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    values: dict[str, Tensor] = {}
    for layer, files in found.items():
        missing = [number for number in range(max(files)) if number not in files]
        if missing:
            raise UsageError(
                f"{folder} is not complete: expert {missing[0]} of layer {layer} is missing"
            )
        for path in files.values():
            content = read_pickle(path)
            if not isinstance(content, dict) or not all(
                isinstance(name, str) and isinstance(value, Tensor)
                for name, value in content.items()
            ):
                raise UsageError(
                    f"{path} is not a file of an expert: it has more than tensors by name"
                )
            values |= content
    return values


def _in_order(folder: Path, kind: str, by_rank: Mapping[int, Path], needed: int) -> list[Path]:
    missing = [rank for rank in range(max(len(by_rank), needed)) if rank not in by_rank]
    if missing:
        raise UsageError(
            f"{folder} is not complete: the {kind} states of rank {missing[0]} are missing"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


# -- optimizer files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Part:
    """One flat tensor of a rank: masters [n] of a parameter group, and the states of the same elements."""

    master: Tensor
    states: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None


# elements from `start` of a parameter are these of the part
_Piece = tuple[int, _Part, slice]
# a parameter's name, shape, group and pieces
_Placed = tuple[str, Shape, int | None, list[_Piece]]


@dataclass(frozen=True, eq=False)
class _Rank:
    """The content of one rank's optimizer file. groups: hyperparameters. raw: DeepSpeed's other values."""

    parts: Sequence[_Part]
    groups: Sequence[Mapping[str, Any]]
    raw: Mapping[str, Any]


def _read_rank(path: Path) -> _Rank:
    content = read_pickle(path)
    raw = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(raw, dict):
        raise UsageError(f"{path} is not an optimizer file of DeepSpeed")
    if raw.get("ds_zero_partition_groups") is not None:
        raise UsageError(
            f"{path} cannot be imported: it is sharded over groups of ranks (experts, MiCS), not over all ranks"
        )
    masters = raw.get(FP32_PARTS, raw.get(FP32_ROWS))
    base = raw.get("optimizer_state_dict" if FP32_PARTS in raw else "base_optimizer_state")
    if masters is None or not isinstance(base, dict) or "param_groups" not in base:
        raise UsageError(
            f"{path} cannot be imported: it does not have both masters ({FP32_ROWS} or {FP32_PARTS}) and the "
            "optimizer's state_dict; elastic checkpoints and optimizer states on NVMe are not read"
        )
    masters, groups = _list(masters), _list(base["param_groups"])
    keys = [(key, number) for number, group in enumerate(groups) for key in _list(group["params"])]
    if len(keys) != len(masters):
        raise UsageError(
            f"{path} contradicts itself: {len(masters)} tensors of masters, and an optimizer of {len(keys)}"
        )
    parts = []
    for master, (key, number) in zip(masters, keys, strict=True):
        states = dict(_table(_table(base["state"]).get(key, {})))
        if states and STEP in groups[number]:  # DeepSpeed's Adam for GPUs keeps it there
            states.setdefault(STEP, groups[number][STEP])
        parts.append(_Part(master.view(-1), states, number))
    return _Rank(parts, groups, raw)


def _cut(parts: Sequence[_Part], begins: Sequence[int], start: int, stop: int) -> Iterator[_Piece]:
    """Elements [start, stop) of a row of parts, of which part i begins at element begins[i]."""
    number = bisect_right(begins, start) - 1
    while start < stop and number < len(parts):
        begin, high = begins[number], min(stop, begins[number + 1])
        if start < high:
            yield start, parts[number], slice(start - begin, high - begin)
        start, number = high, number + 1


# -- the whole checkpoint -----------------------------------------------------------------------------------


@final
class _Source:
    """The checkpoint in a folder, while it is added to `imported`."""

    def __init__(self, folder: Path) -> None:
        model_files, optim_files = _files(folder)
        self.folder = folder
        self.models = [read_pickle(path) for path in model_files]
        self.state: Named = self.models[0]
        self._check_layout()
        self.state["module"] |= _experts(folder)
        self.ranks = [_read_rank(path) for path in optim_files]
        config = self.state.get("ds_config")
        self.config: Named = config if isinstance(config, dict) else {}
        version = self.state.get("ds_version")
        origin = f"DeepSpeed {version if isinstance(version, str) else ''}".strip()
        self.imported = Imported(origin, folder.name, self._stage())
        self.names = self._all_names()
        self.keys: set[str] = set()  # of the optimizer's states

    def _check_layout(self) -> None:
        if not isinstance(self.state, dict) or not isinstance(self.state.get("module"), dict):
            raise UsageError(f"{self.folder} cannot be imported: its model states have no 'module'")
        if self.state.get("autoep_layers") or self.state.get("ds_autoep_layers"):
            raise UsageError(
                f"{self.folder} cannot be imported: AutoEP wrote it; write the whole weights there with "
                "save_16bit_model, and import them"
            )
        parallel = _table(self.state.get("checkpoint_parallel_dimensions"))
        for what, size in (
            ("tensor-parallel", self.state.get("mp_world_size")),
            ("tensor-parallel", parallel.get("tp_degree")),
            ("pipeline", parallel.get("pp_degree")),
        ):
            if size is not None and not (isinstance(size, int) and size == 1):
                raise UsageError(
                    f"{self.folder} cannot be imported: it was written by {size} {what} ranks"
                )

    def _stage(self) -> int:
        if not self.ranks and self.state.get("param_shapes") is not None:
            raise UsageError(
                f"{self.folder} is not complete: there are no optimizer states (*_optim_states.pt)"
            )
        if not self.ranks:
            return 0
        if FP32_PARTS in self.ranks[0].raw:
            return 3
        section = self.config.get("zero_optimization")
        stage = section.get("stage") if isinstance(section, dict) else None
        return 2 if isinstance(stage, int) and stage == 2 else 1

    def _all_names(self) -> dict[str, list[str]]:
        """All names of every tensor of the model, by its first name; that name comes first.

        Tied parameters are those that DeepSpeed recorded, and tensors that share memory.
        """
        aliases: dict[str, str] = dict(_table(self.state.get("shared_params")))
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, value in self.state["module"].items():
            if isinstance(value, Tensor) and value.numel() and name not in aliases:
                first = seen.setdefault((value.data_ptr(), tuple(value.shape)), name)
                if first != name:
                    aliases[name] = first
        names = {name: [name] for name in self.state["module"] if name not in aliases}
        for other, first in aliases.items():
            names.setdefault(first, [first]).append(other)
        return names

    # -- tensors ----------------------------------------------------------------------------------------

    def add_tensors(self) -> None:
        """Add masters and states of all that is trained, frozen parameters, and buffers."""
        module = self.state["module"]
        shapes = self._shapes()
        trained: set[str] = set()
        layout = self._in_parts if self.imported.stage == 3 else self._in_rows
        for name, shape, group, pieces in layout(shapes) if self.ranks else ():
            trained.add(name)
            value = module.get(name)
            dtype = value.dtype if isinstance(value, Tensor) else torch.float32
            self._add(name, shape, dtype, group, pieces)
        buffers = [name for name in _list(self.state.get("buffer_names")) if name in module]
        frozen = [name for name in self.names if name not in {*trained, *buffers}]
        if self.imported.stage == 3:
            self._add_frozen_parts()
            frozen = []
        for name in frozen:
            if isinstance(module.get(name), Tensor):
                self.imported.add_whole("param", self.names[name], module[name])
            else:
                self.imported.note(f"{name} in the model's state is not a tensor: left out")
        for name in buffers:
            self.imported.add_whole("buffer", [name], module[name])

    def _shapes(self) -> list[dict[str, Shape]]:
        """Names and shapes of every flat tensor of masters, the same on every rank."""
        if not self.ranks:
            return []
        counts = self.ranks[0].raw.get("partition_count", len(self.ranks))
        if isinstance(counts, list | tuple):
            counts = max((number for number in counts if isinstance(number, int)), default=None)
        if not isinstance(counts, int) or counts != len(self.ranks):
            raise UsageError(
                f"{self.folder} is not complete: {shown(counts)} ranks wrote it, but it has optimizer states "
                f"of {len(self.ranks)}"
            )
        groups: Any = self.state.get("param_shapes")
        count = len(groups) if isinstance(groups, list) else -1
        if any(len(rank.parts) != count for rank in self.ranks):
            raise UsageError(
                f"{self.folder} contradicts itself: param_shapes in the model states does not fit the shards"
            )
        tables = map(_table, groups)
        return [{name: tuple(_list(shape)) for name, shape in table.items()} for table in tables]

    def _in_rows(self, shapes: Sequence[Mapping[str, Shape]]) -> Iterator[_Placed]:
        """Every parameter at ZeRO 1 and 2: a group is a row over all ranks, or over those with its experts."""
        paddings = self.ranks[0].raw.get("param_alignment_paddings")
        rows = [
            (number, members, expert_rank, ranks)
            for number, members in enumerate(shapes)
            for expert_rank, ranks in enumerate(self._rows_of(number))
        ]
        for number, members, expert_rank, ranks in rows:
            parts = [rank.parts[number] for rank in ranks]
            numels = [part.master.numel() for part in parts]
            # the last ones are saved without padding
            begins = [rank * max(numels) for rank in range(len(parts) + 1)]
            offset = 0
            for place, (name, shape) in enumerate(members.items()):
                cut = _cut(parts, begins, offset, offset + numel_of(shape))
                pieces = [(low - offset, part, here) for low, part, here in cut]
                yield self._global_name(name, number, expert_rank), shape, parts[0].group, pieces
                offset += numel_of(shape) + (0 if paddings is None else paddings[number][place])
            self._check_rest(sum(numels) - offset, ALIGNMENT * len(parts))

    def _rows_of(self, number: int) -> list[Sequence[_Rank]]:
        """The ranks of each row of a group: all, or for each rank of experts those that have its experts."""
        num_rows = self._num_expert_ranks(number)
        if self.config.get("use_data_before_expert_parallelism") is True:
            length = len(self.ranks) // num_rows
            return [self.ranks[row * length : (row + 1) * length] for row in range(num_rows)]
        return [self.ranks[row::num_rows] for row in range(num_rows)]

    def _num_expert_ranks(self, number: int) -> int:
        counts = self.ranks[0].raw.get("partition_count")
        count = counts[number] if isinstance(counts, list | tuple) else len(self.ranks)
        if not isinstance(count, int) or count < 1 or len(self.ranks) % count:
            raise UsageError(
                f"{self.folder} contradicts itself: a group of parameters is sharded over {shown(count)} of "
                f"{len(self.ranks)} ranks"
            )
        return len(self.ranks) // count

    def _global_name(self, name: str, number: int, expert_rank: int) -> str:
        """The name of a parameter in the whole model: DeepSpeed counts experts on each rank from 0."""
        match = re.fullmatch(EXPERT, name)
        if match is None:
            return name
        layer, expert, rest = match.groups()
        keys = (key for key in self.state["module"] if key.startswith(layer))
        num_experts = len({key[len(layer) :].partition(".")[0] for key in keys})
        share = num_experts // self._num_expert_ranks(number)
        return f"{layer}{expert_rank * share + int(expert)}{rest}"

    def _in_parts(self, shapes: Sequence[Mapping[str, Shape]]) -> Iterator[_Placed]:
        """Every parameter at ZeRO 3: each rank has a row with a part of it."""
        begins = [0, *accumulate(part.master.numel() for part in self.ranks[0].parts)]
        offset = 0
        for number, members in enumerate(shapes):
            for name, shape in members.items():
                length = -(-numel_of(shape) // len(self.ranks))
                pieces = []
                for rank, content in enumerate(self.ranks):
                    first = rank * length
                    stop = offset + min(length, numel_of(shape) - first)
                    cut = _cut(content.parts, begins, offset, stop)
                    pieces += [(first + low - offset, part, here) for low, part, here in cut]
                yield name, shape, self.ranks[0].parts[number].group, pieces
                offset += length
        self._check_rest(begins[-1] - offset, 0)

    def _check_rest(self, numel: int, padding: int) -> None:
        """Check that only padding is left: else each parameter may have got the elements of another."""
        if numel > padding:
            raise UsageError(
                f"{self.folder} contradicts itself: {numel} elements of its shards are of no parameter"
            )

    def _add_frozen_parts(self) -> None:
        """Add frozen parameters of stage 3: each rank has a part, the last one with padding."""
        for name, shape in _table(self.state.get("frozen_param_shapes")).items():
            parts = [model["frozen_param_fragments"][name].view(-1) for model in self.models]
            begins = [0, *accumulate(part.numel() for part in parts)]
            shape = tuple(_list(shape))
            stop = numel_of(shape)
            pieces = list(_cut([_Part(part) for part in parts], begins, 0, stop))
            self._add(name, shape, parts[0].dtype, None, pieces)

    def _add(
        self,
        name: str,
        shape: Shape,
        dtype: torch.dtype,
        group: int | None,
        pieces: Sequence[_Piece],
    ) -> None:
        """Add the values and states of a parameter."""
        names = self.names.get(name, [name])
        flat = self.imported.add_flat("param", names, shape, name_of(dtype), group)
        held = 0
        for start, part, here in pieces:
            value = part.master[here]
            held += value.numel()
            self.imported.add_range(flat, "value", start, value)
            for key, state in part.states.items():
                self._add_state(flat, key, start, state, here)
        if held != numel_of(shape):
            raise UsageError(
                f"{self.folder} is not complete: it has {held} of {numel_of(shape)} elements of {name}"
            )

    def _add_state(self, flat: int, key: str, start: int, state: Any, here: slice) -> None:
        """Add one state of elements `here` of a part: a tensor of its elements, or one number for all."""
        dtype = None
        if (
            isinstance(state, Tensor)
            and state.ndim == 1
            and state.numel() >= here.stop
            and key != STEP
        ):
            self.imported.add_range(flat, f"state/{key}", start, state[here])
            self.keys.add(key)
            return
        if isinstance(state, Tensor) and state.numel() == 1:
            dtype, state = name_of(state.dtype), state.item()
        if not isinstance(state, bool | int | float):
            self.imported.note(
                f"the optimizer state {key!r} is not per element: left out, it starts from zero"
            )
            return
        # a number in some of DeepSpeed's optimizers; a tensor in torch's and in those of xds
        if key == STEP:
            dtype, state = "float32", float(state)
        # an optimizer of xds keeps its step on the device of the masters, torch's on the CPU
        on_device = isinstance(self.config.get("optimizer"), dict)
        stop = start + here.stop - here.start
        self.imported.add_constant(
            ConstantRange(flat, f"state/{key}", start, stop, state, dtype, on_device)
        )
        self.keys.add(key)

    # -- values -----------------------------------------------------------------------------------------

    def set_values(self) -> None:
        """Set counters, loss scale, hyperparameters, schedule and client state, as far as they are there."""
        state, imported, note = self.state, self.imported, self.imported.note
        raw = self.ranks[0].raw if self.ranks else state.get("optimizer")
        steps, skipped, samples = (
            int(state.get(what) or 0)
            for what in ("global_steps", "skipped_steps", "global_samples")
        )
        imported.set_counters(steps, skipped, samples, self._accumulation_steps())
        imported.set_state("loss_scale", _loss_scale(raw, self.config))
        if self.ranks:
            self._set_optimizer(self.ranks[0].groups)
        elif isinstance(raw, dict):
            note(
                "at stage 0 DeepSpeed saves optimizer states without names of parameters: they start from "
                "zero, and masters from the model's weights; to keep them, save there with "
                "zero_optimization.stage 1"
            )
        else:
            note("there is no optimizer in it: optimizer states start from zero")
        if isinstance(state.get("lr_scheduler"), dict):
            self._set_scheduler(state["lr_scheduler"])
        for key, what in NOT_READ.items():
            if state.get(key) is not None:
                note(f"the state of the {what} is left out: xds has none")
        mine = {key: value for key, value in state.items() if key not in RESERVED}
        imported.set_state("client_state", imported.storable(mine, "client state"))
        note(
            "DeepSpeed saves no random generators and no data position: they start from the beginning"
        )

    def _accumulation_steps(self) -> int:
        steps = self.config.get("gradient_accumulation_steps")
        if isinstance(steps, int):
            return max(steps, 1)
        total = self.config.get("train_batch_size")
        micro = self.config.get("train_micro_batch_size_per_gpu")
        ranks = self.state.get("dp_world_size")
        if isinstance(total, int) and isinstance(micro, int) and isinstance(ranks, int):
            return max(total // max(micro * ranks, 1), 1)
        return 1

    def _set_optimizer(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the optimizer's class, from the config or by its states, and its hyperparameters."""
        kind = _type_of(self.config.get("optimizer"))
        kind = TYPES.get(kind.lower(), kind) if kind is not None else None
        kind = kind or next((name for keys, name in TYPES_BY_STATES if keys <= self.keys), None)
        if kind is None:
            raise UsageError(
                f"{self.folder} cannot be imported: its config names no optimizer, and none is known with the "
                f"states {', '.join(sorted(self.keys)) or '(there are none)'}; import only the weights: "
                "zero_to_fp32 there, then --from torch here"
            )
        kept = []
        for group in groups:
            values = {
                key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                for key, value in group.items()
                if key not in IMPLEMENTATION and not (key in SWITCHES and not value)
            }
            kept.append(self.imported.storable(values, "hyperparameter"))
        self.imported.set_state("optimizer", {"type": kind, "groups": kept})
        try:
            check_groups(kind, kept)
        except ValueError as error:
            self.imported.note(f"{error}: a load will need load_optimizer_states=False")

    def _set_scheduler(self, state: Named) -> None:
        """Set the schedule's class, from the config or by its keys, and its state."""
        kind = _type_of(self.config.get("scheduler"))
        kind = kind or next((name for key, name in SCHEDULES_BY_KEYS.items() if key in state), None)
        if kind is None:
            self.imported.note(
                f"the class of the lr schedule (keys {', '.join(map(str, state))}) is not known: it starts "
                "from the beginning"
            )
            return
        kept = self.imported.storable(state, "of the lr schedule")
        self.imported.set_state("lr_scheduler", {"type": kind, "state": kept})


def _type_of(section: Any) -> str | None:
    kind = section.get("type") if isinstance(section, dict) else None
    return kind if isinstance(kind, str) else None


def _loss_scale(raw: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """The dynamic loss scale of fp16; empty where there is none."""
    if not isinstance(raw, dict) or not raw.get("dynamic_loss_scale"):
        return {}
    scaler = raw.get("loss_scaler")
    # stage 0 has them beside
    fields = scaler.fields if isinstance(scaler, UnpickledObject) else raw
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
