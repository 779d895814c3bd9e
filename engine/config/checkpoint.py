"""The section `checkpoint` of the config: how checkpoints are written and kept. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, final

from pydantic import Field

from ...utils.schema.keys import Entry, Group, NoEffect, Refused
from ...utils.schema.rules import FLAG, OBJECT, TEXT, number, one_of, whole
from ...utils.schema.section import Section


@final
class Checkpoint(Section):
    """How `save_checkpoint` writes, and how many checkpoints stay."""

    others: ClassVar[Mapping[str, Entry]] = {
        "tag_validation": NoEffect(
            one_of("warn", "ignore", "fail"), "ranks that save under different tags are refused"
        ),
        "load_universal": Refused(
            FLAG,
            "reading DeepSpeed's universal checkpoints is not there yet; set it to false: what xds saves loads "
            "at any stage and number of ranks without it, and `xds checkpoint import` reads DeepSpeed's own",
            harmless=(False,),
        ),
        "use_node_local_storage": Refused(
            FLAG, "all ranks write into one shared folder; set it to false", harmless=(False,)
        ),
        "parallel_write": Group(
            {"pipeline_stage": NoEffect(FLAG, "every rank writes its share", same=(False,))},
            "who writes",
        ),
        "checkpoint_serialization": NoEffect(
            FLAG, "checkpoints are safetensors files and JSON; nothing is pickled", same=(True,)
        ),
        "async_io": NoEffect(FLAG, "checkpoint.async_save writes in the background", same=(False,)),
        "writer": NoEffect(OBJECT, "there is one way of writing"),
    }

    async_save: Annotated[bool, FLAG] = Field(
        False,
        description="save_checkpoint returns once the states are copied to host memory; they are written in "
        "the background",
    )
    keep_last: Annotated[int, whole(0)] = Field(
        0,
        description="checkpoints that stay of those whose tags differ in their numbers alone; 0 keeps all",
    )
    preemption_save_dir: Annotated[str, TEXT] = Field(
        "",
        description="after SIGTERM or SIGUSR1 to any rank, all ranks save there at the same step and leave "
        'with exit code 143; "": such a signal ends the process as usual',
    )
    preemption_seconds: Annotated[float, number(above=0)] = Field(
        30.0,
        description="a rank that has not saved so long after the signal leaves without; the launcher waits "
        "as long",
    )
