"""The pipeline keys of the config. Only one pipeline stage is supported."""

from __future__ import annotations

from ..utils.schema.keys import Entry, Group, NoEffect, Refused
from ..utils.schema.rules import FLAG, TEXT, either, one_of, whole

_ALONE = "it only matters with several pipeline stages, which are not supported yet"

PIPELINE = Group(
    {
        "stages": Refused(
            either(whole(1), one_of("auto")),
            "pipeline stages are not supported yet; set it to 1 and raise zero_optimization.stage",
            harmless=(1, "auto"),
        ),
        "partition": NoEffect(TEXT, _ALONE, same=("best",)),
        "seed_layers": NoEffect(FLAG, _ALONE, same=(False,)),
        "activation_checkpoint_interval": NoEffect(
            whole(0), "the section activation_checkpointing sets it", same=(0,)
        ),
        "pipe_partitioned": NoEffect(FLAG, _ALONE, same=(True,)),
        "grad_partitioned": NoEffect(FLAG, _ALONE, same=(True,)),
        "use_reentrant": NoEffect(FLAG, _ALONE),
        "micro_batches": NoEffect(
            either(whole(1), one_of("auto")), "gradient_accumulation_steps sets the number"
        ),
    },
    "splits the model into stages",
)

TOP_LEVEL_KEYS: dict[str, Entry] = {"pipeline": PIPELINE}
