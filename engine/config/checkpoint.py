"""The config section `checkpoint`. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, final

from pydantic import Field

from ...utils.schema.keys import Entry, Group, NoEffect, Refused
from ...utils.schema.rules import FLAG, OBJECT, TEXT, number, one_of, whole
from ...utils.schema.section import Section


@final
class Checkpoint(Section):
    """How `save_checkpoint` writes checkpoints, and how many it keeps."""

    others: ClassVar[Mapping[str, Entry]] = {
        "parallel_write": Group(
            {"pipeline_stage": NoEffect(FLAG, "every rank writes its share", same=(False,))},
            "which ranks write",
        ),
        "use_node_local_storage": Refused(
            FLAG,
            "a folder on each node was removed; set it to false, and save into a folder that all ranks share",
            harmless=(False,),
        ),
        "checkpoint_serialization": NoEffect(
            FLAG, "checkpoints are safetensors files and JSON; nothing is pickled", same=(True,)
        ),
        "async_io": NoEffect(FLAG, "checkpoint.async_save writes in the background", same=(False,)),
        "writer": NoEffect(OBJECT, "there is only one writer"),
    }

    tag_validation: Annotated[str, one_of("fail", "warn", "ignore")] = Field(
        "fail",
        description="ranks that give save_checkpoint different tags: fail refuses; warn and ignore save under "
        "the tag of rank 0, with a warning or without",
    )
    load_universal: Annotated[bool, FLAG] = Field(
        False,
        description="deepspeed's load_checkpoint takes the tag in `latest_universal`; checkpoints load at "
        "any stage and number of ranks without it",
    )
    async_save: Annotated[bool, FLAG] = Field(
        False,
        description="save_checkpoint returns after the states are copied to host memory; they are written in "
        "the background",
    )
    keep_last: Annotated[int, whole(0)] = Field(
        0,
        description="how many checkpoints are kept among those whose tags differ only in their numbers; 0 "
        "keeps all",
    )
    preemption_save_dir: Annotated[str, TEXT] = Field(
        "",
        description="after SIGTERM or SIGUSR1 to any rank, all ranks save there at the same step and exit "
        'with code 143; "": such a signal ends the process as usual',
    )
    preemption_seconds: Annotated[float, number(above=0)] = Field(
        30.0,
        description="a rank that has not saved this many seconds after its signal exits without saving; the "
        "launcher waits as long",
    )
