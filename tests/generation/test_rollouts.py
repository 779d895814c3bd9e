"""Rollouts of a model that trains: gathers, lengths, bits afterwards, memory, refusals, ranks that fail."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks, run_ranks
from models import build, micro_batch
from runs import config
from torch import Tensor, nn

import xds
from xds.engine.generation import rollout
from xds.utils.errors import PeerError

transformers = pytest.importorskip("transformers")

VOCAB = 64
PROMPT = torch.tensor([[5, 6, 7, 8]])


def gpt2(dropout: float = 0.1, positions: int = 64) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": positions}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    settings = transformers.GPT2Config(**sizes, **drops, **tokens)
    return transformers.GPT2LMHeadModel(settings)


def start(stage: int, model: nn.Module | None = None, **more: Any) -> xds.Engine:
    return xds.initialize(gpt2() if model is None else model, config(stage, **more))


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, VOCAB, (2, 12), generator=generator)


def train(engine: xds.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(input_ids=batch(step), labels=batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def sample(engine: xds.Engine, count: int, **how: Any) -> list[int]:
    prompt = PROMPT + dist.get_rank()
    return engine.generate(prompt, max_new_tokens=count, **how)[0].tolist()


def count_gathers(engine: xds.Engine) -> Counter[str]:
    """From now on, how often each buffer is gathered on this rank."""
    found: Counter[str] = Counter()
    for unit in engine._sharded.units:
        for flat in unit.params:

            def gathered(*args: Any, own: Any = flat._start_gather, name: str = unit.name) -> Any:
                found[name] += 1
                return own(*args)

            flat._start_gather = gathered
    return found


# -- after a rollout the training goes on with the same bits -----------------------------------------------


def trained_with(stage: int, rollouts: bool, precision: str, zero: dict[str, Any]) -> list[float]:
    torch.manual_seed(1 + dist.get_rank())
    engine = start(stage, precision=precision, zero=zero)
    losses = train(engine, range(2))
    if rollouts:
        sample(engine, 5 + 7 * dist.get_rank(), do_sample=True)
        bits = 8 if "offload_param" in zero else None
        with engine.generating(memory_limit=0, bits=bits) as module:  # streamed
            module.generate(PROMPT, max_new_tokens=3 + dist.get_rank(), synced_gpus=False)
        assert engine.training
    losses += train(engine, range(2, 5))
    if rollouts:
        assert sample(engine, 9) == sample(engine, 9)
    return losses


@pytest.mark.parametrize(
    ("stage", "precision", "zero"),
    [
        (0, "fp32", {}),
        (3, "bf16", {"stage3_max_reuse_distance": 0, "overlap_comm": True}),
        pytest.param(3, "fp32", {"offload_param": {"device": "cpu"}}, marks=pytest.mark.slow),
        pytest.param(
            *(2, "fp32", {"offload_optimizer": {"device": "cpu", "overlap_step": True}}),
            marks=pytest.mark.slow,
        ),
        (
            3,
            "bf16",
            {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 5000},
        ),
    ],
)
@pytest.mark.quick("0-fp32-zero0", "3-bf16-zero1")
def test_losses_after_rollouts_have_the_bits_of_a_run_without(
    stage: int, precision: str, zero: dict[str, Any]
) -> None:
    with_rollouts = run_ranks(trained_with, 2, stage, True, precision, zero)
    assert with_rollouts == run_ranks(trained_with, 2, stage, False, precision, zero)


# -- gathers and lengths ------------------------------------------------------------------------------------

LENGTHS = (1, 7, 64, 500)


def unequal_lengths() -> list[int]:
    engine = start(3, gpt2(positions=512))
    train(engine, range(1))
    gathers = count_gathers(engine)
    sent = Counter(engine.bytes_sent())
    found = sample(engine, LENGTHS[dist.get_rank()], do_sample=False)
    assert len(gathers) == 4 and set(gathers.values()) == {1}
    extra = Counter(engine.bytes_sent()) - sent
    shards = sum(flat.layout.shard_numel for unit in engine._sharded.units for flat in unit.params)
    assert extra.pop("control") == 3 * 32 and sum(extra.values()) == 3 * 4 * shards
    assert not any(flat.is_unsharded for unit in engine._sharded.units for flat in unit.params)
    plain = gpt2(positions=512)
    train(engine, range(1, 2))
    plain.load_state_dict(engine.state_dict())
    how = {"max_new_tokens": 20, "do_sample": False}
    wanted = plain.eval().generate(PROMPT + dist.get_rank(), **how)[0].tolist()
    assert sample(engine, 20, do_sample=False) == wanted
    return found


@pytest.mark.slow
def test_four_ranks_generate_1_7_64_and_500_tokens_with_one_gather_a_unit() -> None:
    found = run_ranks(unequal_lengths, 4)
    assert [len(tokens) - PROMPT.shape[1] for tokens in found] == list(LENGTHS)


def kinds_of_decoding(stage: int) -> list[Any]:
    engine = start(stage)
    train(engine, range(1))
    hows: list[dict[str, Any]] = [
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "top_p": 0.8, "num_return_sequences": 2},
        {"cache_implementation": "static", "do_sample": False},
        {"use_cache": False, "do_sample": False},
    ]
    found = []
    for memory_limit in (None, 0) if stage == 3 else (None,):  # gathered, streamed
        with engine.generating(memory_limit=memory_limit, seed=3) as module:
            for how in hows:
                options = {"max_new_tokens": 4, "synced_gpus": False, **how}
                found.append(module.generate(PROMPT + dist.get_rank(), **options).tolist())
    assert found[:5] == found[-5:]
    return found[:5]


def test_decoding_is_that_of_transformers_at_every_stage_gathered_and_streamed() -> None:
    wanted = run_ranks(kinds_of_decoding, 2, 0)
    assert run_ranks(kinds_of_decoding, 2, 3) == wanted


def own_random_numbers() -> None:
    engine = start(3, gpt2(0.0))
    torch.manual_seed(5)
    plain = gpt2(0.0).eval()
    torch.manual_seed(5)
    wanted = plain.generate(PROMPT + dist.get_rank(), max_new_tokens=9, do_sample=True)[0].tolist()
    torch.manual_seed(5)
    assert sample(engine, 9, do_sample=True) == wanted  # the first draws what the script would draw
    assert sample(engine, 9, do_sample=True) != wanted  # and the next one goes on
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())


def test_rollouts_draw_their_own_random_numbers() -> None:
    run_ranks(own_random_numbers, 2)


# -- log-probabilities --------------------------------------------------------------------------------------


def log_probabilities(stage: int) -> None:
    engine = start(stage, gpt2(0.0))
    train(engine, range(2))
    how = {"max_new_tokens": 10, "do_sample": True, "use_cache": False, "seed": 1}
    with engine.generating(seed=how.pop("seed")) as module:
        options = {"output_logits": True, "return_dict_in_generate": True, "synced_gpus": False}
        found = module.generate(PROMPT, **how, **options)
        tokens = found.sequences
    start_at = PROMPT.shape[1]
    exact = engine(input_ids=tokens[:, :-1]).logits.detach()
    for at, logits in enumerate(found.logits):
        chosen = tokens[:, start_at + at, None]
        rollout = logits.log_softmax(-1).gather(1, chosen)
        training = exact[:, start_at + at - 1].log_softmax(-1).gather(1, chosen)
        torch.testing.assert_close(training, rollout, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_log_probabilities_of_a_training_forward_are_those_of_the_rollout(stage: int) -> None:
    run_ranks(log_probabilities, 2, stage)


# -- memory -------------------------------------------------------------------------------------------------


def streamed(world: int, offload: bool) -> int:
    zero: dict[str, Any] = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    if offload:
        zero["offload_param"] = {"device": "cpu"}
    engine = start(3, zero=zero)
    units = engine._sharded.units
    peak = 0

    def note(*_: object) -> None:
        nonlocal peak
        live = sum(unit.full_bytes for unit in units if unit.is_unsharded)
        peak = max(peak, live)

    handles = [one.register_forward_hook(note) for one in engine.module.modules()]
    with engine.generating(memory_limit=0) as module:
        tokens = module.generate(PROMPT, max_new_tokens=5, do_sample=False, synced_gpus=False)
    for handle in handles:
        handle.remove()
    assert tokens.shape[1] == PROMPT.shape[1] + 5
    root, largest = units[-1].full_bytes, max(unit.full_bytes for unit in units[:-1])
    assert 0 < peak <= root + largest
    assert not any(unit.is_unsharded for unit in units)
    return peak


@pytest.mark.parametrize(("world", "offload"), [(2, False), (2, True), (1, True)])
def test_a_streamed_rollout_holds_the_root_and_one_unit(world: int, offload: bool) -> None:
    run_ranks(streamed, world, world, offload)


def in_8_bits(zero: dict[str, Any], precision: str) -> None:
    """Inside, matrices of blocks are rounded, nothing else is; user code may not write."""
    engine = start(3, zero=zero, precision=precision)
    exact = {name: value.clone() for name, value in engine.state_dict().items()}
    matrices = [one for name, one in exact.items() if ".h." in name and one.dim() == 2]
    largest = max(one.abs().max().item() for one in matrices)
    most = (0.51 / 127 + 2**-8 * (precision == "bf16")) * largest  # groups of 256 cross tensors
    seen: set[str] = set()

    def look(block: nn.Module, _: object) -> None:
        number = next(n for n, one in engine.module.transformer.h.named_children() if one is block)
        for name, param in block.named_parameters():
            wanted = exact[f"transformer.h.{number}.{name}"]
            gap = (param.detach() - wanted).abs().max().item()
            assert 0 < gap <= most if param.dim() == 2 else gap == 0, name
            seen.add(name)

    for block in engine.module.transformer.h:
        block.register_forward_pre_hook(look)
    with engine.generating(memory_limit=0, bits=8) as module:
        module.generate(PROMPT, max_new_tokens=1 + dist.get_rank(), synced_gpus=False)
    assert len(seen) == 12
    for name, value in engine.state_dict().items():
        assert torch.equal(value, exact[name]), name


def written_in_8_bits() -> None:
    engine = start(3, zero={"offload_param": {"device": "cpu"}})

    def write(layer: nn.Module, *_: object) -> None:
        with torch.no_grad():
            layer.weight.mul_(2)

    handle = engine.module.transformer.h[0].mlp.c_fc.register_forward_hook(write)
    with pytest.raises(xds.UsageError, match=r"written .* inside of generating\(bits=8\)"):
        with engine.generating(memory_limit=0, bits=8) as module:
            module(PROMPT)
    handle.remove()
    exact = {name: value.clone() for name, value in engine.state_dict().items()}
    layer = engine.module.transformer.h[0].mlp.c_fc
    with pytest.raises(xds.UsageError, match="written"):  # by a forward that does not end
        with engine.generating(memory_limit=0, bits=8) as module:
            handle = layer.register_forward_hook(write)
            blocked = layer.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                module(PROMPT)
    handle.remove()
    blocked.remove()
    assert not any(flat.is_unsharded for unit in engine._sharded.units for flat in unit.params)
    same = [torch.equal(value, exact[name]) for name, value in engine.state_dict().items()]
    assert all(same)
    train(engine, range(1))
    for bits in (4, True, "8"):
        with pytest.raises(xds.UsageError, match="generating: bits"), engine.generating(bits=bits):
            pass
    engine.destroy()
    engine = start(3)
    with pytest.raises(xds.UsageError, match="offload_param"), engine.generating(bits=8):
        pass
    engine.destroy()
    engine = start(3, gpt2(0.0).double(), zero={"offload_param": {"device": "cpu"}})
    found = []
    for bits in (None, 8):  # fp64 has no codes
        with engine.generating(memory_limit=0, bits=bits) as module:
            found.append(module(PROMPT).logits)
    assert found[0].dtype == torch.float64 and torch.equal(*found)


@pytest.mark.parametrize(
    ("world", "disk", "precision"), [(1, False, "fp32"), (2, False, "bf16"), (2, True, "fp32")]
)
def test_streamed_units_may_come_from_copies_in_8_bits(
    tmp_path: Path, world: int, disk: bool, precision: str
) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0} if disk else {}
    run_ranks(in_8_bits, world, {"offload_param": {"device": "cpu", **place}}, precision)


def test_a_rollout_in_8_bits_refuses_what_it_cannot_do() -> None:
    run_ranks(written_in_8_bits, 1)


def chosen_by_memory(caplog_text: list[str]) -> None:
    engine = start(3)
    needed = engine._sharded.bytes_to_gather()
    for limit in (needed, needed - 1 if dist.get_rank() else needed):  # one rank alone has less
        with engine.generating(memory_limit=limit):
            pass


def test_the_way_is_chosen_by_the_rank_with_the_least_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "xds"):
        run_ranks(chosen_by_memory, 2, [])
    lines = [text for text in caplog.messages if text.startswith("generation:")]
    assert len(lines) == 2
    assert "4 units are gathered once a rollout" in lines[0]
    assert "4 units are streamed, each one gathered for each token" in lines[1]


# -- evaluation ---------------------------------------------------------------------------------------------


def evaluated(share: float) -> list[float]:
    engine = start(3, zero={"stage3_max_reuse_distance": 0})
    train(engine, range(2))
    gathers = count_gathers(engine)
    units = engine._sharded.units
    free = sum(unit.full_bytes for unit in units) * 2 * share / rollout.SHARE_OF_FREE
    rollout.free_bytes = lambda device: int(free)
    engine.eval()
    losses = []
    for step in range(5):
        with torch.no_grad():
            losses.append(engine(input_ids=batch(step), labels=batch(step)).loss.item())
    if share >= 1:
        assert set(gathers.values()) == {1} and all(unit.is_unsharded for unit in units)
    else:
        kept = [unit for unit in units if unit.is_unsharded]
        all_bytes = sum(unit.full_bytes for unit in units)
        assert sum(unit.full_bytes for unit in kept) <= share * all_bytes
        assert 0 < len(kept) < 4 and all(gathers[unit.name] == 1 for unit in kept)
        assert all(gathers[unit.name] == 5 for unit in units if unit not in kept)
    with engine.uneven_forwards(), torch.no_grad():  # what is kept may differ by rank then
        for step in range(1 + dist.get_rank()):
            engine(input_ids=batch(step))
    with torch.no_grad():
        engine(input_ids=batch(0))
    losses += train(engine, range(2, 4))  # also in eval mode
    assert not any(unit.is_unsharded for unit in units)
    engine.train()
    return losses + train(engine, range(4, 6))


def not_evaluated() -> list[float]:
    engine = start(0)
    train(engine, range(2))
    engine.module.eval()
    losses = []
    for step in range(5):
        with torch.no_grad():
            losses.append(engine(input_ids=batch(step), labels=batch(step)).loss.item())
    losses += train(engine, range(2, 4))
    engine.module.train()
    return losses + train(engine, range(4, 6))


def test_evaluation_keeps_units_gathered_while_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "free_bytes", rollout.free_bytes)  # to be restored
    wanted = run_ranks(not_evaluated, 2)
    for share in (1.1, 0.5):
        assert run_ranks(evaluated, 2, share) == wanted


# -- the section hybrid_engine ------------------------------------------------------------------------------


def hybrid(pins: bool) -> Counter[str]:
    section = {"enabled": True, "max_out_tokens": 12, "pin_parameters": pins}
    engine = start(3, hybrid_engine=section)
    gathers = count_gathers(engine)
    assert len(sample(engine, 8)) == 12
    for how in ({"max_new_tokens": 9}, {"max_length": 13}):
        with pytest.raises(xds.UsageError, match="tokens, prompt included, is longer than hybrid"):
            engine.generate(PROMPT, **how)
    asked = transformers.GenerationConfig(max_new_tokens=9)
    with pytest.raises(xds.UsageError, match="a sequence of 13 tokens"):
        engine.generate(PROMPT, generation_config=asked)
    return gathers


def test_the_longest_sequence_of_a_call_of_generate() -> None:
    ids, embedded, features = torch.ones(2, 3), torch.ones(2, 5, 8), torch.ones(2, 80, 3000)
    own = transformers.GenerationConfig(max_new_tokens=7)
    for args, kwargs, expected in (
        ((ids,), {"max_new_tokens": 4}, (3, 7)),
        ((), {"input_ids": ids, "max_length": 9}, (3, 9)),
        ((ids,), {"max_length": 2}, (3, 3)),
        ((), {"inputs": ids, "generation_config": own}, (3, 10)),
        ((), {"inputs": ids, "generation_config": own, "max_new_tokens": 1}, (3, 4)),
        ((), {"inputs_embeds": embedded, "max_new_tokens": 1}, (5, 6)),
        ((features,), {"max_new_tokens": 4}, (1, 5)),
        ((), {}, (1, 21)),  # transformers adds 20 tokens where nobody says how many
    ):
        assert rollout.asked_tokens(torch.nn.Identity(), args, kwargs) == expected, kwargs


def test_the_keys_of_deepspeeds_hybrid_engine_have_their_meaning() -> None:
    assert set(run_ranks(hybrid, 2, True)[0].values()) == {1 + 3}
    assert not run_ranks(hybrid, 2, False)[0]  # by requests, for each forward
    with pytest.raises(xds.ConfigError, match="inference_tp_size = 2: .*tensor_parallel.autotp"):
        xds.Config.load(config(3, hybrid_engine={"enabled": True, "inference_tp_size": 2}))


# -- tensor ranks -------------------------------------------------------------------------------------------


def sliced() -> list[list[int]]:
    torch.manual_seed(dist.get_rank())
    engine = start(3, gpt2(0.0), tensor_parallel={"autotp_size": 2})
    plain = gpt2(0.0).eval()
    prompt = PROMPT + dist.get_rank() // 2  # tensor ranks have the same
    found = []
    for memory_limit in (None, 0):
        with engine.generating(memory_limit=memory_limit) as module:
            how = {"max_new_tokens": 3 + dist.get_rank() // 2, "synced_gpus": False}
            greedy = module.generate(prompt, do_sample=False, **how)
            assert torch.equal(greedy, plain.generate(prompt, do_sample=False, **how))
            found.append(module.generate(prompt, do_sample=True, **how)[0].tolist())
    return found


def test_tensor_ranks_generate_the_same_tokens() -> None:
    found = run_ranks(sliced, 4)
    assert found[0] == found[1] and found[2] == found[3]


# -- inside a rollout ---------------------------------------------------------------------------------------


def refused_inside(stage: int, folder: str) -> None:
    engine = start(stage)
    with engine.generating() as module:
        assert module is engine.module and not module.training and not torch.is_grad_enabled()
        with engine.generating():  # of a function that is called inside
            assert engine.generate(PROMPT, max_new_tokens=2).shape == (1, 6)
        with torch.enable_grad():
            loss = engine(input_ids=batch(0), labels=batch(0)).loss
        for call in (
            lambda: engine.backward(loss),
            engine.step,
            engine.offload_states,
            lambda: engine.load_checkpoint(folder),
        ):
            with pytest.raises(xds.UsageError, match=r"inside engine.generating\(\)"):
                call()
        if stage == 3:
            with pytest.raises(xds.UsageError, match=r"backward inside engine.generating\(\)"):
                loss.backward()
    assert engine.training
    engine.zero_grad()
    with engine.generating() as module, torch.enable_grad():
        loss = module(input_ids=batch(0), labels=batch(0)).loss
    engine.backward(loss)  # its units are gathered again
    engine.step()
    train(engine, range(1))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_a_step_and_a_load_inside_are_refused(stage: int, tmp_path: Path) -> None:
    run_ranks(refused_inside, 2, stage, str(tmp_path))


def edits_inside() -> list[float]:
    engine = start(3)
    with engine.generating() as module:
        with torch.no_grad():
            module.transformer.h[0].mlp.c_fc.weight.mul_(2)
    return [train(engine, range(1))[0]]


def edits_before() -> list[float]:
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(2)
    return [train(start(3, model), range(1))[0]]


def test_edits_inside_count_as_anywhere() -> None:
    assert run_ranks(edits_inside, 2) == run_ranks(edits_before, 2)


def wrong_arguments() -> None:
    engine = start(3)
    limits = [{"memory_limit": value} for value in (-1, "8GB")]
    seeds = [{"seed": value} for value in (1.5, True, 1 << 64)]
    for arguments in (*limits, *seeds, {"own_numbers": "no"}):
        with pytest.raises(xds.UsageError, match=f"generating: {next(iter(arguments))} = "):
            with engine.generating(**arguments):
                pass
    with engine.generating(memory_limit=10**30, seed=-1):
        pass
    plain = xds.initialize(nn.Linear(4, 4), config(3))
    with pytest.raises(xds.UsageError, match=r"Linear has no generate\(\)"):
        plain.generate(PROMPT)
    with plain.generating() as module:
        assert module(torch.ones(1, 4)).isfinite().all()


def test_wrong_arguments_are_refused() -> None:
    run_ranks(wrong_arguments, 2)


# -- ranks that fail ----------------------------------------------------------------------------------------


def failing(how: str, folder: str) -> None:
    engine, rank = xds.initialize(build("tied"), config(3)), dist.get_rank()
    try:
        with engine.generating() as module:
            if rank == 1 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                raise ZeroDivisionError("a reward of nothing")
            for _ in range(LENGTHS[rank]):  # they do not wait for rank 1
                module(micro_batch(0, 0))
        engine.backward(engine(micro_batch(0, rank)))
    except PeerError as error:
        Path(folder, str(rank)).write_text(str(error))


@pytest.mark.parametrize("how", ["raises", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_rank_that_fails_is_named_and_holds_up_nobody(how: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="reward" if how == "raises" else "rank 1 died"):
        run_new_ranks(failing, 4, how, str(tmp_path), timeout_seconds=60)
    texts = [Path(tmp_path, str(rank)).read_text() for rank in (0, 2, 3)]
    assert all("rank 1" in text for text in texts)
    if how == "raises":
        assert all(
            "rank 1 raised ZeroDivisionError: a reward of nothing in generation" in text
            for text in texts
        )
