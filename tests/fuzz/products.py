"""Random products of the engine's features against one process.

A seed draws a model, ranks on each axis, a config and events of the training loop. The ranks train six steps.
One process trains the same batches with plain PyTorch and the same events. In the middle the ranks may save,
and go on in an engine with another config. Losses and norms are compared, and the parameters at the end.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tensor_cases import ADAMW, LENGTH, SAMPLES, VOCAB, build
from torch import Tensor, nn
from warm_ranks import warm

import xds

STEPS, MIDDLE = 6, 3
# Relative: of losses and norms in fp32, in the first two steps and later, for a difference in the last bits
# grows from step to step. In 16 bits, and with compressed messages, of losses alone.
EXACT, EPS_OF = (2e-5, 5e-4), {"bf16": 0.06, "fp16": 0.012}
HOST: dict[str, Any] = {"device": "cpu"}
DISK: dict[str, Any] = {"device": "nvme", "nvme_path": "FOLDER"}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": HOST},
    "half": {"offload_optimizer": {**HOST, "ratio": 0.5}},
    "overlap": {"offload_optimizer": {**HOST, "overlap_step": True}},
    "early": {"offload_optimizer": {**HOST, "super_offload": True}},
    "disk": {"offload_optimizer": DISK},
    "params": {"offload_param": HOST},
    "all": {"offload_optimizer": HOST, "offload_param": HOST},
    "all on disk": {"offload_optimizer": DISK, "offload_param": DISK},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "exact": {},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "hpZ": {"zero_hpz_partition_size": 2},
    "MiCS": {"mics_shard_size": 2},
    "shared": {"shared_parameters": True},
}
MORE: dict[str, dict[str, Any]] = {
    "recompute": {"activation_checkpointing": {"enabled": True}},
    "recompute to the host": {
        "activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}
    },
    "tiles": {"sequence": {"tiled_mlp": 3, "tiled_loss": 2}},
    "compile": {"compile": {"enabled": True, "backend": "aot_eager"}},
    "clipping": {"gradient_clipping": 0.3},
    "no overlap": {"zero_optimization": {"overlap_comm": False}},
    "whole units": {"zero_optimization": {"unit_min_numel": 1_000_000}},
    "small units": {"zero_optimization": {"unit_min_numel": 0}},
    "persistent": {"zero_optimization": {"stage3_param_persistence_threshold": 600}},
}
EVENTS = ("frozen before", "frozen later", "edited in place", "edited gathered", "set", "evaluated")
SGD = {"lr": 0.3}
Message = tuple[Any, ...]  # ranks, kind, buffer, what, dtype
SHAPES = [  # pipeline, data, sequence, tensor
    *[(1, 1, 1, 1), (1, 2, 1, 1), (1, 2, 1, 1), (1, 3, 1, 1), (1, 4, 1, 1)],
    *[(2, 1, 1, 1), (2, 2, 1, 1), (4, 1, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 4, 1)],
    *[(1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 2), (2, 1, 2, 1), (1, 1, 2, 2)],
]


@dataclass(frozen=True)
class Layout:
    """What a load may change: the ranks on each axis, the ZeRO stage, and where and how states are."""

    shape: tuple[int, int, int, int]
    stage: int
    offload: str
    messages: str
    schedule: str

    @property
    def size(self) -> int:
        pipe, data, sequence, tensor = self.shape
        return pipe * data * sequence * tensor


@dataclass(frozen=True)
class Product:
    """One training. then: the layout after a load in the middle; None: no load.

    optimizer: AdamW, or SGD, which shows a factor on gradients.
    """

    seed: int
    model: str
    precision: str
    count: int
    more: tuple[str, ...]
    events: tuple[str, ...]
    first: Layout
    then: Layout | None
    optimizer: str = "AdamW"

    @property
    def name(self) -> str:
        def told(layout: Layout) -> str:
            lengths = "x".join(map(str, layout.shape))
            return (
                f"{lengths} zero{layout.stage} {layout.offload} {layout.messages} {layout.schedule}"
            )

        parts = [f"seed {self.seed}: {self.model} {self.precision} count {self.count}"]
        parts += [self.optimizer, *self.more, *self.events, told(self.first)]
        return ", ".join(parts) + ("" if self.then is None else f" -> {told(self.then)}")

    @property
    def rates(self) -> dict[str, Any]:
        return ADAMW if self.optimizer == "AdamW" else SGD

    def config(self, layout: Layout, folder: str) -> dict[str, Any]:
        pipe, _, sequence, tensor = layout.shape
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.count,
            "optimizer": {"type": self.optimizer, "params": dict(self.rates)},
            "watch": {"ring_size": 1_000_000},
            "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        }
        if self.precision != "fp32":
            found[self.precision] = {"enabled": True}
        if self.precision == "fp16":
            found["fp16"]["initial_scale_power"] = 4
        if pipe > 1:
            found["pipeline"] = {"stages": pipe, "schedule": layout.schedule}
        if tensor > 1:
            found["tensor_parallel"] = {"tp_size": tensor}
        if sequence > 1:
            found["sequence_parallel_size"] = sequence
        for name in self.more:
            _merge(found, MORE[name])
        for part in (OFFLOADS[layout.offload], MESSAGES[layout.messages]):
            _merge(found["zero_optimization"], part)
        return _with_folder(found, folder)


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in copy.deepcopy(more).items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _with_folder(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_folder(one, folder) for key, one in value.items()}
    return folder if value == "FOLDER" else value


def draw(seed: int, *, sgd: bool = False) -> Product:
    """The product of a seed. sgd: it trains with SGD without clipping, and may generate."""
    dice = random.Random(seed)
    model = dice.choice(("gpt", "llama", "qwen3", "gpt2"))
    precision = dice.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
    first = _layout(dice, None)
    then = _layout(dice, first.size) if dice.random() < 0.4 else None
    chances = {"compile": 0.05}
    more = tuple(name for name in MORE if dice.random() < chances.get(name, 0.16))
    events = tuple(name for name in EVENTS if dice.random() < 0.15)
    if "recompute to the host" in more:
        more = tuple(name for name in more if name != "recompute")
    count = dice.choice((1, 2, 4))
    if not sgd:
        return Product(seed, model, precision, count, more, events, first, then)
    more = tuple(name for name in more if name != "clipping")
    layouts = [first] if then is None else [first, then]
    if all(one.shape[0] == one.shape[2] == 1 for one in layouts) and dice.random() < 0.3:
        events += ("generated",)
    return Product(seed, model, precision, count, more, events, first, then, "SGD")


def _layout(dice: random.Random, size: int | None) -> Layout:
    """A layout of `size` ranks; None: of any number."""
    shapes = [
        shape
        for shape in SHAPES
        if size is None or shape[0] * shape[1] * shape[2] * shape[3] == size
    ]
    shape = dice.choice(shapes)
    stage = dice.choice((0, 1, 2, 3, 3))
    offload = dice.choice(list(OFFLOADS)) if dice.random() < 0.5 else "none"
    messages = dice.choice(list(MESSAGES)) if dice.random() < 0.25 else "exact"
    schedules = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "auto")
    schedule = dice.choice(schedules) if shape[0] > 1 else "-"
    return Layout(shape, stage, offload, messages, schedule)


def batches(product: Product, step: int, rank: int) -> list[Any]:
    """The micro-batches of a step on data rank `rank`. They do not depend on the layout."""
    found = []
    for micro in range(product.count):
        seed = torch.Generator().manual_seed(7919 * step + 97 * micro + rank)
        ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH + 1), generator=seed)
        if product.model == "gpt":
            found.append((ids[:, :-1], ids[:, 1:]))
        else:
            found.append({"input_ids": ids[:, 1:], "labels": ids[:, 1:].clone()})
    return found


# -- the events of a loop, on a model or an engine ---------------------------------------------------------


def _third(names: list[str], at: int) -> str:
    """A name of a matrix in the middle of the model, the same on every rank."""
    wanted = [name for name in names if name.endswith("weight") and "norm" not in name.lower()]
    wanted = [name for name in wanted if ".0." in name or ".1." in name]
    return sorted(wanted)[at % len(wanted)]


def _name_of(product: Product, event: str) -> str:
    names = [name for name, param in build(product.model).named_parameters() if param.dim() > 1]
    return _third(names, product.seed + EVENTS.index(event))


def _whole_shape(product: Product, event: str) -> torch.Size:
    return dict(build(product.model).named_parameters())[_name_of(product, event)].shape


def before(product: Product, model: nn.Module) -> None:
    """What happens to the model before training."""
    if "frozen before" in product.events:
        dict(model.named_parameters())[_name_of(product, "frozen before")].requires_grad_(False)


def freeze(product: Product, params: dict[str, nn.Parameter]) -> None:
    """Freeze a parameter for good: an optimizer counts the steps of a range, plain PyTorch those of each."""
    param = params.get(_name_of(product, "frozen later"))
    if "frozen later" in product.events and param is not None:
        param.requires_grad_(False)


@torch.no_grad()
def after_step(
    product: Product, step: int, params: dict[str, nn.Parameter], *, plain: bool
) -> None:
    """Events after `step`. Each rank has those parameters that it has."""
    for event in product.events:
        if event == "frozen later" and step == 1:
            freeze(product, params)
        if step != 1 or event not in ("edited in place", "edited gathered", "set"):
            continue
        param = params.get(_name_of(product, event))
        if plain:
            assert param is not None
            param.mul_(0.5) if event.startswith("edited") else param.fill_(0.02)
        elif param is None:
            continue
        elif event == "set":
            xds.zero.set_full_param(param, torch.full(_whole_shape(product, event), 0.02))
        elif event == "edited gathered":
            with xds.zero.GatheredParameters([param], modifier_rank=0):
                param.mul_(0.5)
        elif param.numel() and not bool(param.isnan().any()) and not _is_shared(product):
            param.mul_(0.5)  # whole between steps
        else:
            xds.zero.set_full_param(param, xds.zero.get_full_param(param) * 0.5)


def _is_shared(product: Product) -> bool:
    """Scripts may only read parameters that ranks share."""
    layouts = [product.first, *([product.then] if product.then else [])]
    return any(layout.messages == "shared" for layout in layouts)


# -- training ----------------------------------------------------------------------------------------------

Found = tuple[list[tuple[float, float]], dict[str, Tensor]]


def train(product: Product, folder: str) -> tuple[Found, str, list[Message]]:
    """On each rank: losses, norms and the whole parameters; or why it is refused, and where; its messages."""
    rows: list[tuple[float, float]] = []
    messages: list[Message] = []
    try:
        engine = _engine(product, product.first, folder)
        for step in range(STEPS):
            if step == MIDDLE and product.then is not None:
                engine.save_checkpoint(f"{folder}/saved")
                messages += _messages(engine)
                engine.destroy()
                engine = _engine(product, product.then, folder)
                engine.load_checkpoint(f"{folder}/saved")
                freeze(product, dict(engine.module.named_parameters()))
            batch = batches(product, step, engine.dp_rank)
            loss = engine.train_batch(iter(batch))
            rows.append((loss.item(), float(engine.get_global_grad_norm() or 0)))
            params = dict(engine.module.named_parameters())
            after_step(product, step, params, plain=False)
            if "evaluated" in product.events and step == 2:
                engine.eval_batch(iter(batch))
            if "generated" in product.events and step == 1:
                _generate(engine, batch[0])
        whole = engine.full_state_dict(rank0_only=True, full_precision=True)
        messages += _messages(engine)
        engine.destroy()
    except xds.XdsError as error:
        return (rows, {}), f"{type(error).__name__}: {error}", messages
    return (rows, {name: one.float() for name, one in whole.items()}), "", messages


def _generate(engine: Any, batch: Any) -> None:
    """A rollout of two tokens, which changes nothing. Ranks do not load the library's own loop for it."""
    with engine.generating(seed=3) as module:
        for length in (4, 5):
            ids = (batch["input_ids"] if isinstance(batch, dict) else batch[0])[:, :length]
            module(ids)


def _messages(engine: Any) -> list[Message]:
    """What this rank has sent with others together. Messages between two ranks are left out."""
    ring = engine._parts.sharded.collectives.watch.ring
    everyone = tuple(range(engine.world_size))
    return [
        (one.members or everyone, *one.key, str(one.dtype)) for one in ring if one.members != ()
    ]


def _engine(product: Product, layout: Layout, folder: str) -> Any:
    model = build(product.model, layout.shape[2])
    before(product, model)
    return xds.initialize(model, product.config(layout, folder))


@cache
def plain(product: Product, data: tuple[int, ...], moved: int = 0) -> Found:
    """One process.

    data: the number of data ranks in each step. moved: a seed of other last bits of the weights; 0: none.
    """
    model = build(product.model)
    before(product, model)
    params = dict(model.named_parameters())
    if moved:
        seed = torch.Generator().manual_seed(moved)
        with torch.no_grad():
            for param in params.values():
                param.mul_(1 + 1.2e-7 * torch.randn(param.shape, generator=seed))
    trained = [param for param in params.values() if param.requires_grad]
    optimizer = getattr(torch.optim, product.optimizer)(trained, **product.rates)
    rows = []
    limit = MORE["clipping"]["gradient_clipping"] if "clipping" in product.more else float("inf")
    for step in range(STEPS):
        total = 0.0
        for rank in range(data[step]):
            for batch in batches(product, step, rank):
                loss = model(**batch).loss if isinstance(batch, dict) else model(*batch)
                (loss / (product.count * data[step])).backward()
                total += loss.item() / (product.count * data[step])
        having = [param for param in trained if param.grad is not None]
        rows.append((total, nn.utils.clip_grad_norm_(having, limit).item()))
        optimizer.step()
        optimizer.zero_grad()
        after_step(product, step, params, plain=True)
    return rows, {name: param.detach().clone() for name, param in params.items()}


Run = Callable[..., list[Any]]  # (function, ranks, *arguments) -> the result of each rank


def _on_warm_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return warm(world_size).run(function, *args)


def examine(product: Product, run: Run = _on_warm_ranks) -> tuple[str, str]:
    """("equal" | "refused" | "wrong" | "failed", what was said)."""
    folder = tempfile.mkdtemp()
    try:
        found = run(train, product.first.size, product, folder)
    except AssertionError as error:
        return "failed", str(error)[-3000:]
    refusals = [said for _, said, _ in found]
    if any(refusals):
        return (
            ("refused", refusals[0]) if all(refusals) else ("wrong", f"refused by some: {refusals}")
        )
    last = product.first if product.then is None else product.then
    data = (product.first.shape[1],) * MIDDLE + (last.shape[1],) * (STEPS - MIDDLE)
    said = differences(product, found[0][0], plain(product, data))
    if said:
        said = differences(product, found[0][0], plain(product, data), spread(product, data))
    said += [f"losses of rank {at}" for at, one in enumerate(found) if one[0][0] != found[0][0][0]]
    said += other_messages(product, [messages for *_, messages in found])
    return ("wrong", "; ".join(said)) if said else ("equal", "")


def other_messages(
    product: Product, by_rank: list[list[Message]], *, is_ordered: bool = False
) -> list[str]:
    """Where two ranks have not sent the same messages to the groups that both belong to, in one order.

    With states on the host a gather starts early where its values are there in time: in any order, unless
    `is_ordered` says that messages have no tags.
    """
    layouts = [product.first] if product.then is None else [product.first, product.then]
    is_ordered = is_ordered or all(layout.offload == "none" for layout in layouts)
    said = []
    for one, other in itertools.combinations(range(len(by_rank)), 2):
        mine, theirs = (
            [message for message in by_rank[rank] if {one, other} <= {*message[0]}]
            for rank in (one, other)
        )
        if not is_ordered:
            mine, theirs = sorted(mine), sorted(theirs)
        for at, (my, their) in enumerate(itertools.zip_longest(mine, theirs)):
            if my != their:
                said.append(f"message {at} of ranks {one} and {other}: {my}, {their}")
                break
    return said


def spread(product: Product, data: tuple[int, ...]) -> list[tuple[float, float]]:
    """Of each step: how far loss and norm move, relatively, when the weights' last bits are others."""
    wanted = plain(product, data)[0]
    others = [plain(product, data, moved)[0] for moved in (1, 2, 3)]
    return [
        tuple(max(abs(one[at][k] / wanted[at][k] - 1) for one in others) for k in (0, 1))  # type: ignore[misc]
        for at in range(STEPS)
    ]


def differences(
    product: Product,
    found: Found,
    wanted: Found,
    moves: list[tuple[float, float]] | None = None,
) -> list[str]:
    """What differs by more than the precision explains. moves: what `spread` gives; None: not looked at."""
    layouts = [product.first] + ([] if product.then is None else [product.then])
    messages = {layout.messages for layout in layouts}
    is_exact = product.precision == "fp32" and not messages & {"qwZ", "qgZ"}
    near = max(EPS_OF.get(product.precision, 0.0), 0.06 if messages & {"qwZ", "qgZ"} else 0.0)
    said = []
    for step, (one, other) in enumerate(zip(found[0], wanted[0], strict=True)):
        eps = EXACT[step > 1] if is_exact else near
        near_by = (0.0, 0.0) if moves is None else moves[step]
        pairs = list(zip(("loss", "norm"), one, other, near_by, strict=True))
        for what, mine, theirs, move in pairs if is_exact else pairs[:1]:
            if not abs(mine - theirs) <= max(eps, 2 * move) * max(abs(theirs), 1e-3):
                said.append(f"step {step} {what} {mine:.7g} instead of {theirs:.7g}")
    for name, theirs in wanted[1].items() if is_exact and not said else ():
        mine = found[1].get(name)
        if mine is not None and mine.shape == theirs.shape:
            distance = ((mine - theirs).norm() / theirs.norm().clamp_min(1e-3)).item()
            if not distance <= 1e-3:
                said.append(f"{name} differs by {distance:.1e}")
    return said[:5]


@dataclass
class Summary:
    """What came of many products."""

    run: Run = _on_warm_ranks
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, product: Product) -> str:
        outcome, said = examine(product, self.run)
        self.outcomes[outcome] += 1
        if outcome == "refused":
            self.refusals[said[:160]] += 1
        elif outcome != "equal":
            self.failures.append((outcome, product.name, said))
        return outcome
