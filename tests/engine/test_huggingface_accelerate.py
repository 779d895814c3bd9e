"""accelerate's training loop on an engine, against a plain loop in one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from huggingface_runs import Tokens, config_of, llama
from torch.utils.data import DataLoader
from warm_ranks import warm

import xds
from xds.engine.integrations.accelerate import Accelerator
from xds.engine.optim.schedules import build_scheduler

pytestmark = pytest.mark.filterwarnings("default")  # the packages warn about themselves
TOLERANCE = 2e-5
STEPS, ACCUMULATION, CLIP = 5, 2, 0.3


def plain_loop() -> list[float]:
    """Loss of each micro-batch, and the norm of each step."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for number, batch in enumerate(DataLoader(Tokens(STEPS * 8), batch_size=4)):
        loss = model(**batch).loss
        (loss / ACCUMULATION).backward()
        seen.append(loss.item())
        if (number + 1) % ACCUMULATION == 0:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return seen


def accelerated(stage: int, **more: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, xds_config=config_of(stage), **more
    )
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Tokens(STEPS * 8), batch_size=4 // dist.get_world_size())
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def run(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    seen = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            seen.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return seen


def whole_loop(stage: int) -> Any:
    accelerator, model, optimizer, loader = accelerated(stage)
    assert accelerator.engine.train_batch_size() == 8
    seen = run(accelerator, model, optimizer, loader)
    assert accelerator.engine.micro_steps == STEPS * ACCUMULATION
    accelerator.free_memory(model, optimizer)
    assert accelerator.engine is None
    return seen


@pytest.mark.contract
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerates_loop_gives_the_numbers_of_a_plain_one(stage):
    expected = plain_loop()
    for seen in warm(2).run(whole_loop, stage):
        torch.testing.assert_close(
            torch.tensor(seen), torch.tensor(expected), rtol=TOLERANCE, atol=TOLERANCE
        )


def save_and_load(folder: str, stage: int) -> Any:
    accelerator, model, optimizer, loader = accelerated(stage)
    seen_by_hooks = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, where: seen_by_hooks.append((len(models), len(weights)))
    )
    batches = list(loader)
    run(accelerator, model, optimizer, batches[:4])
    accelerator.save_state(f"{folder}/state")
    whole = run(accelerator, model, optimizer, batches[4:])
    accelerator.load_state(f"{folder}/state")
    again = run(accelerator, model, optimizer, batches[4:])
    state = accelerator.get_state_dict(model)
    names = sorted(state)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{folder}/out",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.save_model(model, f"{folder}/weights")
    accelerator.wait_for_everyone()
    accelerator.free_memory(model)
    loaded = type(unwrapped).from_pretrained(f"{folder}/out").state_dict()
    same = all(torch.equal(loaded[name], value) for name, value in unwrapped.state_dict().items())
    return whole, again, same, names, seen_by_hooks


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loaded_state_goes_on_bit_for_bit_and_models_are_saved_whole(stage, tmp_path):
    results = warm(2).run(save_and_load, str(tmp_path), stage)
    for whole, again, same, _, hooks in results:
        assert again == whole
        assert same
        assert hooks == [(1, 0)]
    assert results[0][3] == sorted(llama().state_dict()) and results[1][3] == []
    assert (tmp_path / "weights" / "model.safetensors").is_file()
    assert (tmp_path / "state" / "xds_engine").is_dir()


TEMPLATE = {
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "weight_decay": "auto",
            "torch_adam": True,
            "adam_w_mode": True,
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def with_placeholders(precision: str) -> Any:
    config = config_of(2, **TEMPLATE, **{precision: {"enabled": "auto"}} if precision else {})
    accelerator = Accelerator(mixed_precision=precision or None, xds_config=config)
    model = llama()
    optimizer = DummyOptim(model.parameters(), lr=5e-3, weight_decay=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=5, warmup_num_steps=2)
    loader = DataLoader(Tokens(20), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    engine = accelerator.engine
    rates, losses = [], []
    for batch in loader:
        rates += scheduler.get_last_lr()
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    group = engine.optimizer.param_groups[0]
    facts = (
        engine.config.gradient_clipping,
        engine.train_batch_size(),
        group["weight_decay"],
        accelerator.mixed_precision,
        next(model.parameters()).dtype,
    )
    accelerator.free_memory(model)
    return rates, losses, facts


@pytest.mark.parametrize("precision", ["", "bf16"])
def test_placeholders_take_optimizer_and_schedule_from_the_config(precision):
    params = {"warmup_max_lr": 5e-3, "warmup_num_steps": 2, "total_num_steps": 5}
    section = xds.Config.load({"scheduler": {"type": "WarmupDecayLR", "params": params}}).scheduler
    schedule = build_scheduler(section, torch.optim.SGD([torch.zeros(1)], lr=1.0))
    expected = []
    for _ in range(5):
        expected += schedule.get_last_lr()
        schedule.step()
    dtype = torch.bfloat16 if precision else torch.float32
    for rates, losses, facts in warm(2).run(with_placeholders, precision):
        assert rates == pytest.approx(expected)
        assert all(loss == loss for loss in losses)
        assert facts == (1.0, 4, 0.1, precision or "no", dtype)


def bad_calls() -> dict[str, str]:
    said = {}

    def attempt(name: str, call: Any) -> None:
        with pytest.raises(xds.XdsError) as caught:
            call()
        said[name] = str(caught.value)

    accelerator = Accelerator(xds_config=config_of(3, train_micro_batch_size_per_gpu=1))
    attempt("early backward", lambda: accelerator.backward(torch.zeros(())))
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    attempt("optimizer alone", lambda: accelerator.prepare(optimizer))
    with_one = Accelerator(xds_config=config_of(3, optimizer={"type": "AdamW"}))
    attempt("two optimizers", lambda: with_one.prepare(model, optimizer))
    attempt("placeholder", lambda: accelerator.prepare(model, DummyOptim(model.parameters())))
    attempt("two models", lambda: accelerator.prepare(model, llama(), optimizer))
    own, optimizer = accelerator.prepare(model, optimizer)
    attempt("a second model", lambda: accelerator.prepare(llama(), DummyOptim([])))
    batch = {key: value.view(1, -1) for key, value in Tokens(1)[0].items()}
    accelerator.backward(own(**batch).loss)
    some = list(own.parameters())[1:]
    attempt("some parameters", lambda: accelerator.clip_grad_norm_(some, 1.0))
    attempt("norm type", lambda: accelerator.clip_grad_norm_(own.parameters(), 1.0, norm_type=1))
    attempt("by value", lambda: accelerator.clip_grad_value_(own.parameters(), 1.0))
    attempt("closure", lambda: optimizer.step(lambda: None))
    attempt("dtype", lambda: own.to(torch.float16))
    attempt("state dict", model.state_dict)
    optimizer.zero_grad()
    attempt("no gradients", optimizer.step)
    attempt("nothing saved", lambda: accelerator.load_state("."))
    accelerator.free_memory(own)
    return said


def test_calls_that_cannot_work_say_why_and_what_to_do():
    said = warm(2).run(bad_calls)[0]
    expected = {
        "early backward": "before a model was prepared with its optimizer",
        "optimizer alone": "pass one model and its optimizer in one call",
        "two optimizers": "pass accelerate.utils.deepspeed.DummyOptim(model.parameters()) instead",
        "placeholder": "DummyOptim needs a section optimizer",
        "two models": "2 trainable models and 1 optimizers",
        "a second model": "already trains a model",
        "some parameters": "pass model.parameters()",
        "norm type": "only 2 is supported",
        "by value": "use clip_grad_norm_",
        "closure": "does not support a closure; remove it",
        "dtype": "set the precision in the config",
        "state dict": "engine.state_dict()",
        "no gradients": "without engine.backward",
        "nothing saved": "save with save_state first",
    }
    assert said.keys() == expected.keys()
    for name, words in expected.items():
        assert words in said[name], name


def test_ranks_that_accelerate_does_not_see_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(xds.UsageError, match="accelerate sees 1 process, but WORLD_SIZE = 2"):
        Accelerator(cpu=False, xds_config=config_of(1))
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fsdp_plugin": object()}, "fsdp_plugin and xds_config are both given"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin and xds_config are both given"),
    ],
)
def test_a_second_backend_is_refused(given, words):
    with pytest.raises(xds.UsageError, match=words):
        Accelerator(xds_config=config_of(1), **given)


def test_without_a_config_it_is_accelerates_own():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same, optimizer = accelerator.prepare(model, optimizer)
    assert same is model and accelerator.engine is None
    accelerator.backward(same(torch.ones(1, 2)).sum())
    optimizer.step()
