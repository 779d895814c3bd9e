"""`DSElasticAgent`: DeepSpeed's agent for restarts, which xds does not have; its launcher restarts ranks."""

from __future__ import annotations

from typing import NoReturn

from ...utils.errors import UsageError
from ..errors import raises_theirs


class DSElasticAgent:
    """A stand-in that can be imported and derived from."""

    @raises_theirs
    def __init__(self, *arguments: object, **options: object) -> NoReturn:
        raise UsageError(
            "deepspeed.elasticity.DSElasticAgent is not covered by xds.deepspeed: start the script with "
            "`xds --max-restarts N --elastic-training`"
        )


__all__ = ["DSElasticAgent"]
