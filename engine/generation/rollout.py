"""Rollouts: `engine.generating()`, forwards without backward between two steps of a training.

    begin     all ranks agree   the way, by memory      units gathered once ──┬── or streamed, by each forward
    inside    each rank alone   transformers' generate, in eval mode, without gradients
    end       each rank alone   units dropped; modes and random numbers are those of before

Ranks that have all units gathered send nothing until the end. So they may generate unequal lengths, and one
that fails does not hold up the others before their next step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from ...offload.device_memory import free_bytes
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import host_key
from ...ops.device import generators
from ...utils.arguments import truth, whole, wrong
from ...utils.errors import UsageError
from ...utils.sizes import size_text
from ...zero.model.sharded_model import ShardedModel
from ..parts import Parts

log = logging.getLogger("xds")

# of the memory that is free: the rest is for the key-value cache and activations
SHARE_OF_FREE = 0.7
NEW_TOKENS = 20  # of transformers' generate, where nobody says how many
UNKNOWN = 1 << 60  # bytes that are free where the system does not say it


@final
class Rollouts:
    """Runs the rollouts of one engine. Owns the random numbers that only they draw."""

    def __init__(self, parts: Parts) -> None:
        self.is_running = False
        self._parts = parts
        self._sharded = parts.sharded
        self._numbers: list[Tensor] | None = None  # where the last rollout has ended
        self._said = ""

    @contextmanager
    def running(
        self,
        memory_limit: int | None,
        seed: int | None,
        own_numbers: bool,
        bits: int | None = None,
    ) -> Iterator[nn.Module]:
        """See `Engine.generating`. A second one inside does nothing."""
        if self.is_running:
            yield self._parts.module
            return
        limit = memory_limit
        if limit is not None:  # no rank has more than UNKNOWN
            limit = min(whole("generating: memory_limit", limit, 0), UNKNOWN)
        truth("generating: own_numbers", own_numbers)
        section = self._parts.config.hybrid_engine
        if limit is None and section.enabled and not section.pin_parameters:
            limit = 0
        if seed is not None:
            is_whole = isinstance(seed, int) and not isinstance(seed, bool)
            if not is_whole or not -(1 << 63) <= seed < 1 << 64:
                raise wrong("generating: seed", seed, "a whole number of 64 bits, or None")
        self._check_bits(bits)
        with self._sharded.collectives.publishing_errors("generation"):
            self._sharded.check_unchanged()
            gathers = self._gathers(limit, "" if bits is None else f" in {bits} bits")
            with (
                self._sharded.rollout(gathers=gathers, in_bits=bits is not None),
                self._own_numbers(seed) if own_numbers else nullcontext(),
                _evaluating(self._parts.module),
                torch.no_grad(),
                self._parts.uneven.running(self._parts.autocast, streams=not gathers),
                self._parts.autocast(),
            ):
                self.is_running = True
                try:
                    yield self._parts.module
                finally:
                    self.is_running = False

    def _check_bits(self, bits: int | None) -> None:
        """
        Raises:
            UsageError: not a number of bits that is supported, or the parameters are on the device.
        """
        if bits is None:
            return
        from ...offload.coded import BITS

        if isinstance(bits, bool) or bits != BITS:
            raise wrong("generating: bits", bits, f"{BITS} or None")
        if not self._sharded.stores.shards.is_on_host:
            raise UsageError(
                f"generating: bits = {bits}: the parameters are on the device, and nothing is copied from the "
                "host; set zero_optimization.offload_param.device, or leave bits out"
            )

    def generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's `generate`. transformers' would let ranks at stage 3 wait for one another."""
        generate = getattr(self._parts.module, "generate", None)
        if generate is None:
            raise UsageError(
                f"engine.generate(): {type(self._parts.module).__name__} has no generate(); write "
                "`with engine.generating() as module:` and call its forward for each token"
            )
        if _takes(self._parts.module, "synced_gpus"):
            kwargs = {"synced_gpus": False, **kwargs}
        self._check_length(args, kwargs)
        return generate(*args, **kwargs)

    def _check_length(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """
        Raises:
            UsageError: the prompt with the tokens that are asked for is longer than hybrid_engine says.
        """
        section = self._parts.config.hybrid_engine
        if not section.enabled:
            return
        _, asked = asked_tokens(self._parts.module, args, kwargs)
        if asked > section.max_out_tokens:
            raise UsageError(
                f"engine.generate(): a sequence of {asked} tokens, prompt included, is longer than "
                f"hybrid_engine.max_out_tokens = {section.max_out_tokens}; generate fewer, or raise the key"
            )

    # -- the way ----------------------------------------------------------------------------------------

    def _gathers(self, limit: int | None, how: str) -> bool:
        """All units fit into the memory of every rank. A collective at stage 3."""
        sharded = self._sharded
        if sharded.gatherer is None or sharded.defers:
            return True
        needed, spare = _least_room(sharded.collectives, sharded.bytes_to_gather(), limit)
        has_room = needed <= spare
        num_units = sum(unit.may_be_resharded for unit in sharded.units)
        if has_room and num_units:  # a small model has all its parameters on every rank
            self._say(f"{num_units} units are gathered once a rollout, {size_text(needed)} a rank")
        if not has_room:
            self._say(
                f"{num_units} units are streamed{how}, each one gathered for each token, because all of them "
                f"take {size_text(needed)} a rank and {size_text(spare)} may be used; a larger batch costs no "
                "more messages"
            )
        return has_room

    def _say(self, text: str) -> None:
        if text.partition(",")[0] != self._said and self._sharded.collectives.rank == 0:
            log.info("generation: %s", text)
        self._said = text.partition(",")[0]

    # -- random numbers ---------------------------------------------------------------------------------

    @contextmanager
    def _own_numbers(self, seed: int | None) -> Iterator[None]:
        """Inside, random numbers are those of rollouts. Outside, they are as if no rollout had run."""
        device = self._parts.device
        before = _states(device)
        if seed is not None:
            torch.manual_seed(seed)
        elif self._numbers is not None:
            _set_states(self._numbers, device)
        self._share_numbers(device)
        try:
            yield
        finally:
            self._numbers = _states(device)
            _set_states(before, device)

    def _share_numbers(self, device: torch.device) -> None:
        """Ranks that have slices of one model sample the same tokens: those of the first of them."""
        groups = self._sharded.flat_groups
        slices = next(iter(groups.slices.values()), None)
        if slices is None or groups.mesh.tensor == 1:
            return
        states = _states(device)
        for state in states:
            moved = state.to(device)
            slices.group.broadcast(moved, 0, "the random numbers of a rollout")
            state.copy_(moved)
        _set_states(states, device)


def _least_room(collectives: Collectives, needed: int, limit: int | None) -> tuple[int, int]:
    """What the rank with the least room needs, and may use, in bytes. A collective."""
    return max(_rooms(collectives, needed, limit), key=lambda pair: pair[0] - pair[1])


def _rooms(collectives: Collectives, needed: int, limit: int | None) -> list[tuple[int, int]]:
    """What each rank needs, and may use, in bytes. A collective, of 32 bytes.

    On CPUs the ranks of a machine share what is free. limit: what this rank may use; None: a share of that.
    """
    is_shared = collectives.device.type == "cpu"
    free = free_bytes(collectives.device)
    row = [host_key(), needed, UNKNOWN if free is None else free, -1 if limit is None else limit]
    sent = torch.tensor(row, dtype=torch.int64, device=collectives.device)
    table = collectives.gather_small(sent, what="the memory for a rollout").tolist()
    found = []
    for host, own, here, given in table:
        neighbours = [other for other in table if other[0] == host] if is_shared else [[host, own]]
        wanted = sum(other[1] for other in neighbours)
        room = int(SHARE_OF_FREE * here * own / wanted) if wanted else 0
        found.append((own, room if given < 0 else given))
    return found


def spare_bytes(sharded: ShardedModel) -> int:
    """Bytes that gathered units may take on each rank during an evaluation. A collective."""
    needed = sharded.bytes_to_gather()
    return min(room for _, room in _rooms(sharded.collectives, needed, None))


def asked_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Tokens of the prompt, and of the longest sequence that `module.generate(*args, **kwargs)` may return.

    Features that are no tokens, such as those of speech, count as a prompt of one token.
    """
    prompts = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs")]
    lengths = [one.shape[1] for one in prompts if isinstance(one, Tensor) and one.dim() == 2]
    embedded = kwargs.get("inputs_embeds")
    if isinstance(embedded, Tensor) and embedded.dim() == 3:
        lengths.append(embedded.shape[1])
    prompt = max(lengths, default=1)
    settings = kwargs.get("generation_config")
    if settings is None:
        settings = getattr(module, "generation_config", None)
    new, longest = (
        getattr(settings, name, None) if kwargs.get(name) is None else kwargs[name]
        for name in ("max_new_tokens", "max_length")
    )
    if isinstance(new, int):
        return prompt, prompt + new
    return prompt, max(prompt, longest) if isinstance(longest, int) else prompt + NEW_TOKENS


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """`module` in eval mode; afterwards each module has its own mode again."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode


def _takes(module: nn.Module, name: str) -> bool:
    """`module.generate` has a parameter `name`, or gives it on to that of its base model (PEFT)."""
    found = inspect.signature(module.generate).parameters  # type: ignore[arg-type]
    if name in found:
        return True
    inner = getattr(module, "get_base_model", None)
    is_open = any(one.kind is one.VAR_KEYWORD for one in found.values())
    return is_open and callable(inner) and _takes(inner(), name)


def _states(device: torch.device) -> list[Tensor]:
    return [generator.get_state() for generator in generators(device)]


def _set_states(states: list[Tensor], device: torch.device) -> None:
    for generator, state in zip(generators(device), states, strict=True):
        generator.set_state(state)


__all__ = ["Rollouts", "asked_tokens", "spare_bytes"]
