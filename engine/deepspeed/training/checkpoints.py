"""The checkpoint methods of `DeepSpeedEngine`, and the files that DeepSpeed's users expect beside a checkpoint.

save_dir/latest, zero_to_fp32.py
save_dir/<tag>/            the checkpoint of xds
               mp_rank_00_model_states.pt        stages 0 to 2: {"module": weights, counters, client_state}
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....utils.arguments import wrong
from ....utils.errors import UsageError
from ....utils.small_files import read_small_file, replace_small_file
from ....utils.version import __version__
from ....zero.access.gathered import GatheredParameters
from ....zero.access.guards import has_parts
from ...checkpoint.exports.publish import published
from ...checkpoint.imports.deepspeed import is_deepspeed
from ...checkpoint.io.folders import LATEST, MANIFEST, check_folder, named_in
from ...checkpoint.io.reader import CheckpointReader
from ...checkpoint.random_state import read_random_state, set_random_state
from ...engine import Engine
from ..accelerate import engine_that_saves
from ..errors import methods_raise_theirs
from ..library.log import logger


def refuse_theirs(folder: Path, tag: str | None) -> None:
    """Raise where `folder`, or its checkpoint `tag` (None: the one in `latest`), was written by DeepSpeed.

    Raises:
        UsageError: it names the command that imports such a checkpoint.
    """
    if tag is None:
        try:
            tag = named_in(folder / LATEST) or ""
        except UsageError:
            return  # the load reports it
    here = folder / tag
    if (here / MANIFEST).exists():
        return
    if (here / "zero").is_dir():
        raise UsageError(
            f"{here} is a universal checkpoint of DeepSpeed, which is not read: import the checkpoint it was "
            f"made from with `xds checkpoint import {folder} NEW_FOLDER --tag ITS_TAG`, and load NEW_FOLDER"
        )
    if is_deepspeed(here):
        name = f" --tag {tag}" if tag else ""
        raise UsageError(
            f"{here} is a checkpoint of DeepSpeed: import it once with `xds checkpoint import {folder} "
            f"NEW_FOLDER{name}`, and load NEW_FOLDER"
        )


_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """A copy of `item` in which each tensor has memory of its own, on `device`.

    `torch.save` writes the whole storage of a view, and parameters of an engine are views of large buffers.

    Args:
        item: a tensor, or lists, tuples and dicts of them, nested; all else is kept as it is. Two names of one
            tensor stay one tensor.

    Called by accelerate for an engine whose ranks have parts of parameters below stage 3, such as experts, it
    returns the whole weights on rank 0, and None on other ranks.
    """
    engine = engine_that_saves()
    if isinstance(engine, Checkpoints) and has_parts(engine._engine.module):
        return engine._consolidated_16bit_state_dict()
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, made: dict[int, Tensor]) -> Any:
    if isinstance(item, Tensor):
        if id(item) not in made:
            made[id(item)] = item.detach().to(device, copy=True)
        return made[id(item)]
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device, made)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):  # it takes its values one by one
        return type(item)(*(_clone(value, device, made) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_clone(value, device, made) for value in item)
    return item


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """The file of the weights of a model-parallel rank, such as "00"."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


_TO_FP32 = f'''#!/usr/bin/env python
"""Writes the fp32 weights of the checkpoint in this folder: python zero_to_fp32.py . output_dir

Written by xds {__version__}, which must be installed.
"""

from xds.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

if __name__ == "__main__":
    main()
'''


LATEST_UNIVERSAL = "latest_universal"  # read where checkpoint.load_universal is set
CustomLoad = Callable[..., Any]  # called with src=, the state dict, and dst=, the module


@methods_raise_theirs
class Checkpoints(ABC):
    """Saves and loads the states of `_engine`."""

    _engine: Engine

    @abstractmethod
    def zero_optimization_partition_weights(self) -> bool:
        """Each rank has a part of each parameter."""

    # -- whole checkpoints --------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """`xds.Engine.save_checkpoint`, and DeepSpeed's files beside it.

        Rank 0 also writes the weights as `mp_rank_00_model_states.pt` where it has them whole: at stages 0 to
        2, without a pipeline, and not with checkpoint.async_save.
        """
        engine = self._engine
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        engine.save_checkpoint(save_dir, name, client_state, save_latest, exclude_frozen_parameters)
        if engine.global_rank == 0:
            self._write_theirs(Path(save_dir), name, client_state or {}, exclude_frozen_parameters)
        engine.internals.barrier()  # the files are there when this returns
        return True

    def _write_theirs(
        self, save_dir: Path, tag: str, client_state: Mapping[str, Any], exclude_frozen: bool
    ) -> None:
        """Write DeepSpeed's files. A failure is logged: the checkpoint is complete, and other ranks wait."""
        own = Path(get_model_ckpt_name_for_rank(save_dir / tag, "00"))
        try:
            own.unlink(missing_ok=True)  # that of an earlier save under this tag
            self._copy_recovery_script(save_dir)
            if self._has_whole_weights():
                _save_whole(self._model_state(client_state, exclude_frozen), own)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
            logger.warning("the checkpoint %s is complete, but not %s: %s", tag, own.name, error)

    def _copy_recovery_script(self, save_path: str | Path) -> None:
        """Write zero_to_fp32.py into the folder, unless it is there. Some scripts replace this method."""
        path = Path(save_path) / "zero_to_fp32.py"
        with suppress(OSError):
            if read_small_file(path) == _TO_FP32.encode():
                return
        replace_small_file(path, _TO_FP32)
        with suppress(OSError):  # some file shares have no such mode
            path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def _has_whole_weights(self) -> bool:
        engine = self._engine
        mesh = engine.internals.rank_mesh
        is_whole = not self.zero_optimization_partition_weights() and not mesh.has_parts
        return is_whole and not engine.config.checkpoint.async_save

    def _model_state(self, client_state: Mapping[str, Any], exclude_frozen: bool) -> dict[str, Any]:
        engine = self._engine
        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen)
        scheduler: Any = engine.lr_scheduler
        return {
            "module": clone_tensors_for_torch_save(weights),
            "optimizer": None,  # its states are in the files of xds
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "dp_world_size": engine.dp_world_size,
            "mp_world_size": 1,
            **self._more_state(client_state),
        }

    def _more_state(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """What DeepSpeed's load returns beside the script's own entries: all that it does not read itself."""
        return {
            "buffer_names": [name for name, _ in self._engine.module.named_buffers()],
            "global_samples": self._engine.global_samples,
            "ds_config": {},
            "ds_version": f"xds {__version__}",
            **client_state,
        }

    def load_checkpoint(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """`xds.Engine.load_checkpoint`, but random generators keep their states, as in DeepSpeed.

        Libraries restore them themselves, and draw the order of the data before that. The client_state has
        DeepSpeed's entries too: `ds_version`, `global_samples` and others.

        Args:
            tag: None is the one in `latest`, or in `latest_universal` with checkpoint.load_universal.
            custom_load_fn: called with `src=` (the checkpoint's weights by name) and `dst=` (the module) on
                rank 0, where the module is whole; the other ranks get its result. All else is loaded before.
        """
        folder = check_folder("load_dir", load_dir)
        name = self._tag_of(folder) if tag is None else str(tag)
        refuse_theirs(folder, name)
        self._engine.internals.access_guards.forget()
        device = self._engine.device
        random_state = read_random_state(device)
        found = self._engine.load_checkpoint(
            load_dir,
            name,
            load_module_strict=load_module_strict and custom_load_fn is None,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
        set_random_state(random_state, device)
        if custom_load_fn is not None and found[0] is not None:
            src = _weights_of(found[0]) if self._engine.global_rank == 0 else {}
            self._load_by(custom_load_fn, src)
        return found if found[1] is None else (found[0], self._more_state(found[1]))

    def _tag_of(self, load_dir: Path) -> str | None:
        """The tag in `latest_universal`, where the config asks for it and it is there."""
        is_asked = self._engine.config.checkpoint.load_universal
        return named_in(load_dir / LATEST_UNIVERSAL) if is_asked else None

    def _load_by(self, custom_load_fn: CustomLoad, src: Mapping[str, Any]) -> None:
        module = self._engine.module
        with GatheredParameters(list(module.parameters()), modifier_rank=0):
            if self._engine.global_rank == 0:
                custom_load_fn(src=src, dst=module)

    # -- weights ------------------------------------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights, in the compute dtype, to one file on rank 0. A collective."""
        folder = check_folder("save_dir", save_dir)
        if not isinstance(save_filename, str):
            raise wrong("save_filename", save_filename, "the name of a file")
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            _save_whole(weights, folder / save_filename)
        self._engine.internals.barrier()  # the file exists when this returns
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Whole weights on rank 0, on the CPU, in the compute dtype; None on other ranks. A collective."""
        weights = self._engine.full_state_dict(rank0_only=True)
        if not weights:
            return None
        params = dict(self._engine.module.named_parameters(remove_duplicate=False))
        kept = {}
        for name, value in weights.items():
            param = params.get(name)
            if param is None or param.requires_grad or not exclude_frozen_parameters:
                kept[name] = value if param is None else value.to(param.dtype)
        self._engine.internals.access_guards.remember(kept, self._engine.module)
        return kept

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own state_dict. At stage 3 it has placeholders of shape [0]: use full_state_dict()."""
        module = self._engine.module
        weights: dict[str, Any] = module.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            for name, param in module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    weights.pop(prefix + name, None)
        return weights

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Overwrite the weights by `checkpoint["module"]`, whole values on every rank. A collective.

        Args:
            custom_load_fn: as in `load_checkpoint`.
            fetch_z3_params: without effect; whole values are taken at every stage.
        """
        if not isinstance(checkpoint, Mapping) or "module" not in checkpoint:
            raise wrong(
                "load_module_state_dict: checkpoint", checkpoint, 'a dict with the key "module"'
            )
        weights = checkpoint["module"]
        if custom_load_fn is not None:
            self._load_by(custom_load_fn, weights)
        else:
            self._engine.load_state_dict(weights, strict=strict)


def _weights_of(folder: str) -> dict[str, Tensor]:
    """The weights of a checkpoint by name; tied names have one tensor."""
    with CheckpointReader(folder) as reader:
        found = {one.name: reader.read(one) for one in reader.values.values()}
        found.update({other: found[name] for other, name in reader.tied.items() if name in found})
    return found


def _save_whole(state: Any, path: Path) -> None:
    """Write a file that is whole whenever it is there."""
    with published(path, is_folder=False, overwrite=True) as part:
        torch.save(state, part)
