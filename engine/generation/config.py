"""The section hybrid_engine: DeepSpeed's settings of generation by the model that trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from pydantic import Field

from ...utils.schema.section import Entry, NoEffect, Refused, Section
from ...utils.schema.values import Count, Flag


@final
class HybridEngine(Section):
    """How `engine.generate` runs, with or without this section; see docs/generation.md."""

    others: ClassVar[Mapping[str, Entry]] = {
        "inference_tp_size": Refused(
            Count,
            "generation is cut over ranks where the training is; set tensor_parallel.autotp_size",
            harmless=(1,),
        ),
        "tp_gather_partition_size": NoEffect(
            Count, "units are gathered one by one, once a rollout"
        ),
        "release_inference_cache": NoEffect(
            Flag, "the key-value cache is freed after each generate", same=(True,)
        ),
        "enable_cuda_graph": NoEffect(
            Flag,
            'pass cache_implementation="static" to generate, which is compiled on a GPU',
            same=(False,),
        ),
    }

    enabled: Flag = Field(False, description="the other keys of this section count")
    max_out_tokens: Count = Field(
        512, description="longest sequence of engine.generate, prompt included; a longer one raises"
    )
    pin_parameters: Flag = Field(
        True, description="all units are gathered for a rollout, if they fit; false streams them"
    )


__all__ = ["HybridEngine"]
