"""Top-level keys of the config that the engine does not read, each with the reason."""

from __future__ import annotations

from typing import Any

from ...compression import config as compression
from ...experts import config as experts
from ...offload import config as offload
from ...ops.optim.config import FUSED
from ...utils.schema.section import Entry, Group, NoEffect, Refused, details
from ...utils.schema.values import (
    Count,
    Flag,
    Natural,
    Positive,
    SomeElements,
    Text,
)

_APEX = "Apex is not supported; use torch_autocast or bf16 instead"
_GRADIENTS = (
    "sparse gradients are not supported yet; set it to false, use sparse=False in embeddings"
)
_PREDIVIDE = "gradients are averaged either way; only the order of sum and division differs"
_GATHERED = "old name of zero_optimization.allgather_bucket_size: a unit is gathered in one call"


def _switch(feature: str) -> dict[str, Entry]:
    why = f"{feature} is not supported yet; set it to false or remove the section"
    return {"enabled": Refused(Flag, why, harmless=(False,))}


TOP_LEVEL_KEYS: dict[str, Entry] = {
    "prescale_gradients": NoEffect(Flag, _PREDIVIDE, same=(False,)),
    "gradient_predivide_factor": NoEffect(Positive, _PREDIVIDE, same=(1,)),
    "sparse_gradients": Refused(Flag, _GRADIENTS, harmless=(False,)),
    "allgather_size": NoEffect(SomeElements, _GATHERED),
    "disable_fused_adam": NoEffect(Flag, FUSED, same=(False,)),
    "disable_allgather": NoEffect(Flag, "the stage decides what is gathered", same=(False,)),
    "disable_python_gc": NoEffect(Flag, "call gc.disable() in the script", same=(False,)),
    "graph_harvesting": NoEffect(Flag, "the update is already one native call", same=(False,)),
    "vocabulary_size": NoEffect(Count, "DeepSpeed uses it only for a warning"),
    "cuda_visible_devices": NoEffect(Any, "set the environment variable CUDA_VISIBLE_DEVICES"),
    "local_rank": NoEffect(Any, "the launcher's environment says it"),
    "grandient_accumulation_steps": Refused(  # as scripts of DeepSpeed spell it, which ignores it
        Count, "write gradient_accumulation_steps", harmless=(1,)
    ),
    "datastates_ckpt": Group(
        "a checkpoint engine", open=True, present="checkpoints have only one writer; remove it"
    ),
    "amp": Group(
        "Apex mixed precision", {"enabled": Refused(Flag, _APEX, harmless=(False,))}, open=True
    ),
    "nebula": Group(
        "checkpoints in a cloud service",
        _switch("saving to Nebula"),
        details(Text, "persistent_storage_path nebula_load_path"),
        details(Natural, "persistent_time_interval num_of_version_in_retention"),
        details(Flag, "enable_nebula_load"),
    ),
    **offload.TOP_LEVEL_KEYS,
    **compression.TOP_LEVEL_KEYS,
    **experts.TOP_LEVEL_KEYS,
}
