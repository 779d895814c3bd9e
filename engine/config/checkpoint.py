"""The config section `checkpoint`. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from ...utils.schema.section import Entry, Group, NoEffect, Refused, Section
from ...utils.schema.values import ANY_CASE, Flag, Natural, Object, Positive


@final
class Checkpoint(Section):
    """How `save_checkpoint` writes checkpoints, and how many it keeps."""

    others: ClassVar[Mapping[str, Entry]] = {
        "parallel_write": Group(
            "which ranks write",
            {"pipeline_stage": NoEffect(Flag, "every rank writes its share", same=(False,))},
        ),
        "use_node_local_storage": Refused(
            Flag,
            "a folder on each node was removed; set it to false, and save into a folder that all ranks share",
            harmless=(False,),
        ),
        "checkpoint_serialization": NoEffect(
            Flag, "checkpoints are safetensors files and JSON; nothing is pickled", same=(True,)
        ),
        "async_io": NoEffect(Flag, "checkpoint.async_save writes in the background", same=(False,)),
        "writer": NoEffect(Object, "there is only one writer"),
    }

    tag_validation: Annotated[Literal["fail", "warn", "ignore"], ANY_CASE] = Field(
        "fail",
        description="ranks that give save_checkpoint different tags: fail refuses; warn and ignore save under "
        "the tag of rank 0, with a warning or without",
    )
    load_universal: Flag = Field(
        False,
        description="deepspeed's load_checkpoint takes the tag in `latest_universal`; checkpoints load at "
        "any stage and number of ranks without it",
    )
    async_save: Flag = Field(
        False,
        description="save_checkpoint returns after the states are copied to host memory; they are written in "
        "the background",
    )
    keep_last: Natural = Field(
        0,
        description="how many checkpoints are kept among those whose tags differ only in their numbers; 0 "
        "keeps all",
    )
    preemption_save_dir: str = Field(
        "",
        description="after SIGTERM or SIGUSR1 to any rank, all ranks save there at the same step and exit "
        'with code 143; "": such a signal ends the process as usual',
    )
    preemption_seconds: Positive = Field(
        30.0,
        description="a rank that has not saved this many seconds after the signal exits without saving; the "
        "launcher waits as long",
    )
