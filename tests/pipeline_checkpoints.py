"""Test helper: saves a small model cut in any way, loads it cut in another, and compares what ranks hold."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers import run_ranks
from saved_checkpoints import values_of
from torch import Tensor, nn

import xds
from xds.ops.boxes import Box
from xds.ops.flat import numel_of
from xds.ops.mesh import Mesh
from xds.zero.checkpoint.ranges import pieces
from xds.zero.checkpoint.snapshot import Snapshot

VOCAB, WIDTH, LENGTH, STEPS, COUNT = 48, 13, 6, 2, 4
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


class Block(nn.Module):
    """A residual block of odd shapes with buffers that differ between data ranks; gate and up are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * 19)
        self.down = nn.Linear(19, WIDTH, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x.transpose(1, 2)).transpose(1, 2)).chunk(2, -1)
        return x + self.down(nn.functional.gelu(gate) * up) * scale


PLAN = {"blocks.*.up": "packed_colwise", "blocks.*.down": "rowwise"}


class Net(nn.Module):
    """Embeddings, four blocks, a head; a buffer that every stage reads."""

    def __init__(self, *, tied: bool, frozen: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.embed.weight
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)
        if frozen:
            self.position.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.scale)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Cut:
    """How the model is cut over ranks, and which parameters are tied or frozen."""

    pipe: int
    data: int
    stage: int
    tied: bool = True
    frozen: int = 0
    precision: str = "fp32"
    tensor: int = 1

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.pipe, self.data, tensor=self.tensor)

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def kind(self) -> tuple[bool, int]:
        """Cuts of one kind have the same parameters."""
        return self.tied, self.frozen

    @property
    def tag(self) -> str:
        kind = f"{'tied' if self.tied else 'apart'}-{self.frozen}-{self.precision}"
        return f"{self.pipe}x{self.data}x{self.tensor}-zero{self.stage}-{kind}"


@dataclass(frozen=True)
class Part:
    """Elements `at` of what `key` names of `name`: "value" or "state/..."."""

    kind: str
    name: str
    key: str
    at: Tensor
    values: Tensor


@dataclass(frozen=True)
class Held:
    """All that one rank holds; `facts`: what is the same on all ranks."""

    parts: list[Part]
    generators: str  # of random numbers
    facts: dict[str, Any]


def samples() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    return [(pair[0], pair[1]) for pair in torch.randint(0, VOCAB, (96, 2, LENGTH), generator=draw)]


def config_of(cut: Cut, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {
            "stage": cut.stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
        "pipeline": {"stages": cut.pipe},
        "tensor_parallel": {"tp_size": cut.tensor, "plan": PLAN},
        **PRECISIONS[cut.precision],
        **changes,
    }


def engine_of(cut: Cut, seed: int, weights: Any = None, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = Net(tied=cut.tied, frozen=cut.frozen)
    config = config_of(cut, **changes)
    return xds.initialize(model, config, training_data=samples(), weights=weights)


def places_in(shape: tuple[int, ...], box: Box | None) -> Tensor:
    """For each element of a tensor, or of a slice of one, its place in the whole."""
    if box is None:
        return torch.arange(numel_of(shape))
    whole = torch.arange(numel_of(box.whole)).view(box.whole)
    parts = [whole.narrow(box.dim, start, stop - start) for start, stop in box.ranges]
    return torch.cat(parts, box.dim).flatten()


def parts_of(engine: Any) -> Iterator[Part]:
    """Every element of parameters, buffers and states on this rank; one of what a range of elements shares."""
    own = engine._parts
    snapshot = Snapshot(own.module, own.sharded, own.updater)
    shapes = {slot.name: slot.shape for flat in snapshot.flats for slot in flat.slots}
    for block in (*snapshot.values, *snapshot.states):
        flat = values_of(block)
        for piece in pieces(snapshot.flats[block.flat], block.start, block.stop):
            here = flat[piece.target : piece.target + piece.stop - piece.start]
            at = places_in(shapes[piece.name], piece.box)[piece.start : piece.stop]
            yield Part(piece.kind, piece.name, block.key, at, here.clone())
    for one in snapshot.constants:
        for piece in pieces(snapshot.flats[one.flat], one.start, one.stop):
            value = torch.tensor([float(one.value)])
            yield Part("constant", piece.name, one.key, torch.tensor([0]), value)
    for flat in (
        flat for unit in own.sharded.units for flat in unit.params if not flat.shards_params
    ):
        for slot, param in zip(flat.layout.slots, flat.params, strict=True):
            at = places_in(slot.shape, slot.box)
            yield Part("computed", slot.name, "value", at, param.detach().reshape(-1).clone())


def held_by(engine: Any) -> Held:
    facts = {
        "steps": engine.global_steps,
        "learning rates": engine.get_lr(),
        "position": engine.training_dataloader.position(),
    }
    generators = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()
    return Held(list(parts_of(engine)), generators, facts)


def write(folder: str, cut: Cut) -> Held:
    """Train two steps and save."""
    engine = engine_of(cut, seed=0)
    for _ in range(STEPS):
        engine.train_batch()
    torch.manual_seed(100 + torch.distributed.get_rank())
    engine.save_checkpoint(folder, cut.tag)
    found = held_by(engine)
    engine.destroy()
    return found


def read(folder: str, cut: Cut, tags: list[str]) -> list[Held]:
    """Load the checkpoints, one over the other."""
    engine = engine_of(cut, seed=9)
    found = []
    for tag in tags:
        engine.load_checkpoint(folder, tag)
        found.append(held_by(engine))
    engine.destroy()
    return found


Place = tuple[str, str]  # a name, and which of its tensors


class Saved:
    """What all ranks of a cut held when it was saved."""

    def __init__(self, cut: Any, ranks: list[Held]) -> None:
        """cut: a `Cut`, or another with its mesh and tag."""
        self.cut = cut
        self.mesh = cut.mesh
        self.ranks = ranks
        self.buffers: dict[tuple[str, int], Tensor] = {}  # by name and data rank
        parts: dict[Place, list[Part]] = {}
        for rank, held in enumerate(ranks):
            data = self.mesh.coordinates(rank).data
            for part in held.parts:
                if part.kind == "buffer":
                    self.buffers.setdefault((part.name, data), part.values)
                if part.kind != "computed":
                    parts.setdefault((part.name, part.key), []).append(part)
        self.whole: dict[Place, Tensor] = {}
        for place, found in parts.items():
            numel = 1 + max(int(part.at.max()) for part in found)
            whole = self.whole[place] = torch.zeros(numel, dtype=found[0].values.dtype)
            for part in found[::-1]:  # the first rank's buffers stay
                whole[part.at] = part.values

    def differences(self, cut: Any, ranks: list[Held], *, values_only: bool = False) -> list[str]:
        """What ranks of `cut` that loaded it hold differently; a name for each.

        values_only: parameters and buffers alone were loaded.
        """
        found: list[str] = []
        mesh = cut.mesh
        covered: dict[Place, set[int]] = {}
        for rank, held in enumerate(ranks):
            data = mesh.coordinates(rank).data
            found += [] if values_only else self._others(cut, rank, held)
            for part in held.parts:
                if values_only and part.key != "value":
                    continue
                covered.setdefault((part.name, part.key), set()).update(part.at.tolist())
                wanted = self._wanted(part, data if cut.data == self.cut.data else 0)
                if not torch.equal(part.values, wanted.to(part.values.dtype)):
                    found.append(f"rank {rank}: {part.name} {part.key} at {part.at[0]}")
        for place, values in self.whole.items():
            is_wanted = place[1] == "value" if values_only else place[1] != "state/step"
            if is_wanted and len(covered.get(place, ())) != values.numel():
                found.append(f"{place} is on no rank")
        return found

    def _others(self, cut: Any, rank: int, held: Held) -> list[str]:
        """Counters and random generators that differ."""
        found = []
        if held.facts != self.ranks[0].facts:
            found.append(f"rank {rank}: {held.facts}, saved {self.ranks[0].facts}")
        if cut.data == self.cut.data:
            data = cut.mesh.coordinates(rank).data
            source = rank if cut.mesh == self.mesh else self.mesh.rank_at(data=data)
            if held.generators != self.ranks[source].generators:
                found.append(f"rank {rank}: the random generators")
        return found

    def _wanted(self, part: Part, data: int) -> Tensor:
        if part.kind == "buffer":
            return self.buffers[part.name, data]
        whole = self.whole[part.name, part.key]
        return whole[part.at]


# -- random cuts --------------------------------------------------------------------------------------------

KINDS = ((True, 0), (False, 0), (True, 1), (False, 2))  # tied, frozen
LOADS_OF_ONE = 5  # checkpoints that one engine loads


def random_loads(folder: str, count: int, seed: int) -> Iterator[tuple[str, Cut, list[str]]]:
    """Save random cuts and load them at other random cuts `count` times: tag, cut, differences."""
    draw = random.Random(seed)
    lengths = [(p, d, t) for p in (1, 2, 4) for d in (1, 2) for t in (1, 2, 4) if p * d * t <= 8]
    cuts = [Cut(p, d, z, tensor=t) for p, d, t in lengths for z in range(4)]

    def cut_of(tied: bool, frozen: int) -> Cut:
        precision = draw.choice(list(PRECISIONS))
        return replace(draw.choice(cuts), tied=tied, frozen=frozen, precision=precision)

    saved: dict[tuple[bool, int], dict[Cut, Saved]] = {kind: {} for kind in KINDS}
    for number in range(-(-count // LOADS_OF_ONE)):
        kind = KINDS[number % len(KINDS)]
        there = saved[kind]
        wanted = max(LOADS_OF_ONE, len(there) + 1)
        while len(there) < wanted:
            fresh = cut_of(*kind)
            if fresh not in there:
                there[fresh] = Saved(fresh, run_ranks(write, fresh.world_size, folder, fresh))
        chosen = draw.sample(list(there.values()), LOADS_OF_ONE)
        here = cut_of(*kind)
        tags = [one.cut.tag for one in chosen]
        results = run_ranks(read, here.world_size, folder, here, tags)
        for at, one in enumerate(chosen):
            yield one.cut.tag, here, one.differences(here, [held[at] for held in results])
