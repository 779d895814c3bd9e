"""Weights that leave the engine: values, bytes, memory, adapters, files, a receiver of packed broadcasts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from models import build, micro_batch
from real_models import build as real_model
from runs import config
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import xds
from xds.zero.access import buckets

pytest.importorskip("transformers")
MODEL = "llama"


def start(stage: int, model: nn.Module | None = None, **more: Any) -> xds.Engine:
    if model is None:
        torch.manual_seed(0)
        model = real_model(MODEL)
    return xds.initialize(model, config(stage, **more))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert found[name].is_contiguous() and torch.equal(found[name].cpu(), value), name


def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    seen: dict[int, str] = {}
    return {n: v for n, v in state.items() if seen.setdefault(v.data_ptr() or id(v), n) == n}


def values(stage: int, dtype: torch.dtype | None, bucket_bytes: int, more: dict[str, Any]) -> None:
    engine = start(stage, **more)
    wanted = untied(engine.state_dict())
    if dtype is not None:
        wanted = {name: value.to(dtype) for name, value in wanted.items()}
    sent = engine.bytes_sent().get("weights", 0)
    weights = engine.weights(bucket_bytes=bucket_bytes, dtype=dtype)
    metadata = weights.metadata
    assert engine.bytes_sent().get("weights", 0) == sent
    found = dict(weights)
    same(found, wanted)
    assert metadata == [(name, v.dtype, tuple(v.shape)) for name, v in found.items()]
    if stage == 3 and not more:
        own = engine.bytes_sent()["weights"] - sent
        everyone = torch.tensor([own])
        dist.all_reduce(everyone)
        others = dist.get_world_size() - 1
        widths = [min(value.element_size(), 4) * value.numel() for value in wanted.values()]
        assert everyone.item() == others * sum(widths)  # the narrower dtype is sent
    assert (
        not any(flat.is_unsharded for u in engine._sharded.units for flat in u.params) or stage < 3
    )


@pytest.mark.parametrize(
    ("world", "stage", "dtype", "bucket_bytes", "more"),
    [
        (2, 0, None, 1 << 20, {}),
        (2, 2, torch.bfloat16, 1 << 20, {"precision": "bf16"}),
        (3, 3, None, 1 << 20, {}),
        (3, 3, torch.bfloat16, 3000, {}),
        (4, 3, torch.float64, 1, {}),
        (2, 3, torch.float32, 5000, {"precision": "bf16"}),
        (2, 3, None, 5000, {"zero": {"offload_param": {"device": "cpu"}}}),
        (1, 3, None, 5000, {"zero": {"offload_param": {"device": "cpu"}}}),
        (4, 3, None, 5000, {"zero": {"mics_shard_size": 2}}),
        (2, 3, None, 5000, {"precision": "bf16", "zero": {"zero_quantized_weights": True}}),
        (4, 3, None, 5000, {"tensor_parallel": {"autotp_size": 2}}),
        (2, 0, None, 5000, {"tensor_parallel": {"autotp_size": 2}}),
    ],
)
@pytest.mark.quick(
    "1-3-None-5000-more7", "2-3-None-5000-more6", "3-3-dtype3-3000-more3", "2-0-None-1048576-more0"
)
def test_weights_are_those_of_the_state_dict(
    world: int, stage: int, dtype: torch.dtype | None, bucket_bytes: int, more: dict[str, Any]
) -> None:
    run_ranks(values, world, stage, dtype, bucket_bytes, more)


def buckets_in_memory() -> None:
    engine = start(3)
    storages: list[StorageWeakRef] = []
    peak, own, bucket_bytes = 0, buckets._Flight.__init__, 8000

    def counted(flight: Any, *args: Any) -> None:
        nonlocal peak
        own(flight, *args)
        storages.append(StorageWeakRef(flight._flat.untyped_storage()))
        peak = max(peak, len({one for one in storages if not one.expired()}))

    buckets._Flight.__init__ = counted  # type: ignore[method-assign]
    try:
        sizes = [tensor.nbytes for _, tensor in engine.weights(bucket_bytes=bucket_bytes)]
    finally:
        buckets._Flight.__init__ = own  # type: ignore[method-assign]
    assert len(storages) > 3 and max(sizes) <= bucket_bytes
    assert peak == 2


def test_two_buckets_are_in_memory() -> None:
    run_processes(buckets_in_memory, 2)


def given_up() -> None:
    engine = start(3)
    for _ in engine.weights(bucket_bytes=4000):
        break
    engine.train()
    same(dict(engine.weights()), untied(engine.state_dict()))
    with pytest.raises(xds.UsageError, match="the ranks pass different arguments"):
        engine.weights(bucket_bytes=1000 + dist.get_rank())
    for wrong in ({"bucket_bytes": 0}, {"names": "vllm"}, {"dtype": torch.int8}, {"dtype": "bf16"}):
        with pytest.raises(xds.UsageError, match=f"weights: {next(iter(wrong))} = "):
            engine.weights(**wrong)


def test_a_loop_that_ends_early_leaves_nothing_behind() -> None:
    run_ranks(given_up, 2)


# -- adapters -----------------------------------------------------------------------------------------------


def with_lora(**more: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = {"r": 3, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(real_model(MODEL), peft.LoraConfig(**{**settings, **more}))


def merged(stage: int, more: dict[str, Any]) -> None:
    plain = with_lora(**more)
    names = set(plain.state_dict())
    engine = start(stage, with_lora(**more))
    before = engine.state_dict()
    wanted = untied(plain.merge_and_unload().state_dict())
    found = dict(engine.weights(merge_adapters=True, bucket_bytes=5000))
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-6), name
    apart = dict(engine.weights())
    assert {name for name in apart if "lora_" in name} == {
        name for name in names if "lora_" in name
    }
    same(engine.state_dict(), before)


@pytest.mark.parametrize(
    ("stage", "more"), [(0, {}), (3, {"modules_to_save": ["norm"], "use_rslora": True})]
)
def test_adapters_are_added_and_the_parameters_stay(stage: int, more: dict[str, Any]) -> None:
    run_ranks(merged, 2, stage, more)


def tied_embeddings() -> nn.Module:
    """A Llama whose head is the table of its tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


def no_sums() -> None:
    """Each of these changes what a forward computes by more than a sum with the weight of one layer."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "down_proj"]
    configs = {
        "DoRA, a bias": peft.LoraConfig(use_dora=True, target_modules=targets),
        "DoRA, a bias, or another": peft.LoraConfig(
            alora_invocation_tokens=[3], target_modules=targets
        ),
        "ia3": peft.IA3Config(target_modules=targets, feedforward_modules=["down_proj"]),
        "oft": peft.OFTConfig(oft_block_size=4, target_modules=targets),
        "trainable_tokens": peft.LoraConfig(target_modules=targets, trainable_token_indices=[3]),
        "prompts": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "tied": peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]),
    }
    for kind, settings in configs.items():
        plain = tied_embeddings()
        names = set(untied(plain.state_dict()))
        engine = start(3, peft.get_peft_model(plain, settings))
        with pytest.raises(xds.UsageError, match=f"merge_adapters=True.*{kind}"):
            engine.weights(merge_adapters=True)
        assert names <= {one.name for one in engine.weights().metadata}, kind


def test_an_adapter_that_is_no_sum_is_refused() -> None:
    run_ranks(no_sums, 2)


def placed_otherwise() -> None:
    """Adapters that are off, or that no PeftModel around the whole model shows."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    plain = tied_embeddings()
    original = {name: value.clone() for name, value in untied(plain.state_dict()).items()}
    name = "model.layers.0.self_attn.q_proj.weight"

    def found(model: nn.Module) -> dict[str, Tensor]:
        # nothing refers to the engine: the weights keep what they need of it
        weights = start(3, model).weights(merge_adapters=True)
        return {name: value.clone() for name, value in weights}

    off = peft.get_peft_model(plain, settings)
    off.base_model.disable_adapter_layers()
    for param in off.parameters():
        param.requires_grad_(True)
    same(found(off), original)
    inside = tied_embeddings()
    inside.add_adapter(settings)
    layer = inside.get_submodule(name.removesuffix(".weight"))
    wanted = original[name] + layer.get_delta_weight("default").detach()
    injected = found(inside)
    assert sorted(injected) == sorted(original)
    assert torch.allclose(injected[name], wanted, atol=1e-6)
    part = nn.ModuleDict({"text": peft.get_peft_model(tied_embeddings(), settings)})
    assert sorted(found(part)) == sorted(f"text.{name}" for name in original)


def test_adapters_are_found_wherever_they_are() -> None:
    run_ranks(placed_otherwise, 2)


# -- files --------------------------------------------------------------------------------------------------


def saved(folder: str) -> None:
    engine = start(3)
    target = Path(folder, "step0")
    weights = engine.weights(bucket_bytes=8000)
    assert weights.save(target) == target
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and all((target / name).exists() for name in files)
    assert not list(target.glob("*.part"))
    mode = (target / "config.json").stat().st_mode
    assert all((target / name).stat().st_mode == mode for name in files)  # that others may read
    state = engine.state_dict()
    loaded = type(engine.module).from_pretrained(target).state_dict()
    same({name: value.clone() for name, value in loaded.items()}, state)
    engine.backward(
        engine(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    )
    engine.step()
    if engine.global_rank == 0:  # transformers reads it before the index of earlier
        engine.module.save_pretrained(target, state_dict=state)
    engine.weights(dtype=torch.bfloat16).save(target)
    assert len(list(target.glob("model-*"))) == 1 and not (target / "model.safetensors").exists()
    now = {name: value.to(torch.bfloat16) for name, value in engine.state_dict().items()}
    loaded = type(engine.module).from_pretrained(target).state_dict()
    same({name: value.clone() for name, value in loaded.items()}, now)
    assert engine.module.config.dtype != "bfloat16"  # the user's object stays
    (target.parent / "file").touch()
    for _ in range(2):  # every rank goes on
        with pytest.raises(xds.UsageError, match="rank 0: .*file is a file, but a folder must be"):
            engine.weights().save(target.parent / "file")
    with pytest.raises(xds.XdsError, match=r"rank 0: .*choose a folder"):
        engine.weights().save("/sys/out")
    for wrong in ("", None, 3):
        with pytest.raises(xds.UsageError, match="must be the path of a folder"):
            engine.weights().save(wrong)  # type: ignore[arg-type]


def test_a_folder_of_files_loads_with_from_pretrained(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path))


# -- packed broadcasts --------------------------------------------------------------------------------------


def unpacked(
    received: Iterator[Tensor], metadata: list[Any], limit: int
) -> Iterator[tuple[str, Tensor]]:
    """A stand-in for vLLM's receiver: it knows names, dtypes, shapes and the size of a buffer, in order."""
    waiting, size = [], 0
    for at, (name, dtype, shape) in enumerate(metadata):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        waiting.append((name, dtype, shape, num_bytes))
        size += num_bytes
        if size > limit or at == len(metadata) - 1:
            buffer = next(received)
            assert buffer.dtype == torch.uint8 and buffer.numel() == size
            for one, part in zip(waiting, buffer.split([w[3] for w in waiting]), strict=True):
                yield one[0], part.view(one[1]).view(one[2])
            waiting, size = [], 0


def packed() -> None:
    engine = start(3, precision="bf16")
    weights = engine.weights(bucket_bytes=4000)
    metadata = weights.metadata
    same(dict(unpacked(weights.packed(6000), metadata, 6000)), untied(engine.state_dict()))


def test_packed_buffers_are_those_that_a_receiver_expects() -> None:
    run_ranks(packed, 2)


def with_buffers() -> None:
    engine = xds.initialize(build("tied"), config(3))
    engine.backward(engine(micro_batch(0, dist.get_rank())))
    engine.step()
    same(dict(engine.weights(names="module")), untied(engine.state_dict()))


def test_a_model_of_its_own_gives_its_names() -> None:
    run_ranks(with_buffers, 2)
