"""transformers.Trainer on an engine, against the plain Trainer in one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from huggingface_runs import Tokens, config_of, curve, llama, logged, trainer
from warm_ranks import warm

import xds
from xds.engine.optim.schedules import build_scheduler

pytestmark = pytest.mark.filterwarnings("default")  # the packages warn about themselves
TOLERANCE = 2e-5  # relative, of losses and gradient norms after up to six steps in fp32


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the plain Trainer logs, evaluates and predicts."""
    done = trainer(tmp_path_factory.mktemp("plain"), eval_strategy="steps", eval_steps=3)
    done.train()
    return curve(done), logged(done, "eval_loss"), done.predict(Tokens(7, 9)).predictions


def close(one: Any, two: Any, tolerance: float = TOLERANCE) -> None:
    assert len(one) == len(two)
    torch.testing.assert_close(torch.tensor(one), torch.tensor(two), rtol=tolerance, atol=tolerance)


# -- the same numbers ---------------------------------------------------------------------------------------


def train(folder: str, world_size: int, config: Any, **more: Any) -> Any:
    done = trainer(
        folder, world_size, eval_strategy="steps", eval_steps=3, xds_config=config, **more
    )
    done.train()
    predicted = done.predict(Tokens(7, 9)).predictions
    result = curve(done), logged(done, "eval_loss"), predicted
    done.engine.destroy()
    return result


def same_as(plain: Any, result: Any) -> None:
    close(result[0], plain[0])
    close(result[1], plain[1])
    close(result[2].tolist(), plain[2].tolist(), 1e-4)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_logs_evaluates_and_predicts_what_the_plain_trainer_does(stage, plain, tmp_path):
    same_as(plain, train(str(tmp_path), 1, config_of(stage)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_log_evaluate_and_predict_what_the_plain_trainer_does(stage, plain, tmp_path):
    for result in warm(2).run(train, str(tmp_path), 2, config_of(stage)):
        same_as(plain, result)


ADAMW = {"type": "AdamW", "params": {key: "auto" for key in ("lr", "betas", "eps", "weight_decay")}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "scheduler": WARMUP,
}


@pytest.mark.parametrize("stage", [0, 3])
def test_the_configs_optimizer_decays_the_same_parameters_as_the_trainers(stage, plain, tmp_path):
    config = config_of(stage, **{key: AUTO[key] for key in AUTO if key != "scheduler"})
    for result in warm(2).run(train, str(tmp_path), 2, config):
        same_as(plain, result)


def with_schedule(folder: str) -> Any:
    done = trainer(folder, dist.get_world_size(), xds_config=config_of(2, **AUTO))
    done.train()
    rates = [rate for (rate,) in logged(done, "learning_rate")]
    more = done.lr_scheduler.get_last_lr()
    done.engine.destroy()
    return rates, more


def test_the_configs_schedule_runs_over_the_trainers_steps(tmp_path):
    params = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"}
    params["warmup_max_lr"] = 1e-2
    section = xds.Config.load({"scheduler": {"type": "WarmupDecayLR", "params": params}}).scheduler
    schedule = build_scheduler(section, torch.optim.SGD([torch.zeros(1)], lr=1e-2))
    expected = []
    for _ in range(6):
        expected += schedule.get_last_lr()
        schedule.step()
    for rates, last in warm(2).run(with_schedule, str(tmp_path)):
        assert rates == pytest.approx(expected)
        assert last == pytest.approx(schedule.get_last_lr() * 2)


def bf16(folder: str) -> Any:
    done = trainer(
        folder, dist.get_world_size(), bf16=True, xds_config=config_of(3), bf16_full_eval=True
    )
    done.train()
    loss = done.evaluate()["eval_loss"]
    dtypes = {p.dtype for p in done.model.parameters()}
    done.engine.destroy()
    return [value for (value,) in logged(done, "loss")], loss, dtypes


def test_bf16_of_the_arguments_reaches_the_engine(plain, tmp_path):
    for losses, evaluated, dtypes in warm(2).run(bf16, str(tmp_path)):
        close([losses], [plain[0][::2]], 0.02)
        assert abs(evaluated - plain[1][-1][0]) < 0.05
        assert dtypes == {torch.bfloat16}


def fp16(folder: str) -> Any:
    scale = {"initial_scale_power": 40, "hysteresis": 1}
    config = config_of(2, fp16={"enabled": "auto", **scale})
    done = trainer(folder, dist.get_world_size(), fp16=True, xds_config=config, max_steps=24)
    done.train()
    facts = done.engine.skipped_steps, done.lr_scheduler.state_dict()["last_epoch"]
    done.engine.destroy()
    return [value for (value,) in logged(done, "loss")], facts


def test_a_skipped_fp16_step_does_not_move_the_schedule(tmp_path):
    for losses, (skipped, scheduled) in warm(2).run(fp16, str(tmp_path)):
        assert skipped > 0
        assert scheduled == 24 - skipped
        assert losses[-1] < losses[0]


# -- saving -------------------------------------------------------------------------------------------------


def interrupted(folder: str, stage: int) -> Any:
    """Six steps in one go, and three, then three more by a new Trainer."""
    world_size = dist.get_world_size()
    config = config_of(stage, **({"optimizer": ADAMW} if stage == 3 else {}))
    whole = trainer(folder, world_size, xds_config=config, save_strategy="steps", save_steps=3)
    whole.train()
    whole.engine.destroy()
    resumed = trainer(folder, world_size, xds_config=config)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    values = resumed.engine.full_state_dict(rank0_only=False)
    resumed.engine.destroy()
    final = {name: p.detach() for name, p in whole.model.named_parameters()}
    same = all(torch.equal(values[name], value) for name, value in final.items())
    return curve(whole), curve(resumed), same


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_goes_on_bit_for_bit(stage, tmp_path):
    for whole, resumed, same in warm(2).run(interrupted, str(tmp_path), stage):
        assert resumed == whole
        assert same


def saved(folder: str, stage: int) -> Any:
    done = trainer(folder, dist.get_world_size(), llama(tied=True), xds_config=config_of(stage))
    done.train()
    done.save_model(f"{folder}/out")
    done.save_state()
    dist.barrier()
    again = type(done.model).from_pretrained(f"{folder}/out")
    done.engine.destroy()
    values = dict(done.model.named_parameters())
    return [
        name for name, value in again.named_parameters() if not torch.equal(value, values[name])
    ], again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("stage", [2, 3])
def test_a_saved_model_loads_with_from_pretrained(stage, tmp_path):
    for different, is_tied in warm(2).run(saved, str(tmp_path), stage):
        assert different == []
        assert is_tied
    assert (tmp_path / "out" / "model.safetensors").is_file()


def best(folder: str, save_only_model: bool) -> Any:
    done = trainer(
        folder,
        dist.get_world_size(),
        xds_config=config_of(3),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_only_model=save_only_model,
        save_total_limit=2,
        load_best_model_at_end=True,
        learning_rate=3.0,  # it gets worse and worse
    )
    done.train()
    losses = [loss for (loss,) in logged(done, "eval_loss")]
    after = done.evaluate()["eval_loss"]
    done.engine.destroy()
    return losses, after


@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_best_model_is_loaded_at_the_end(save_only_model, tmp_path):
    for losses, after in warm(2).run(best, str(tmp_path), save_only_model):
        assert min(losses) < losses[-1]
        assert after == pytest.approx(min(losses), rel=1e-6)


# -- what comes next ----------------------------------------------------------------------------------------


def lora(folder: str) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(2)
        return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    world_size = dist.get_world_size()
    config = config_of(3)
    more = dict(xds_config=config, save_strategy="steps", save_steps=3)
    done = trainer(folder, world_size, adapted(), **more)
    done.train()
    done.save_model(f"{folder}/adapter")
    dist.barrier()
    resumed = trainer(folder, world_size, adapted(), xds_config=config)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    resumed.engine.destroy()
    done.engine.destroy()
    again = PeftModel.from_pretrained(llama(), f"{folder}/adapter")
    tokens = torch.arange(3, 9).view(1, -1)
    with torch.no_grad():
        apart = (again(tokens).logits - done.model(tokens).logits).abs().max().item()
    return curve(done), curve(resumed), apart


def test_lora_trains_saves_its_adapter_and_resumes(tmp_path):
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    alone = trainer(tmp_path / "plain", 1, model)
    alone.train()
    for whole, resumed, apart in warm(2).run(lora, str(tmp_path)):
        close([whole], [curve(alone)])
        assert resumed == whole
        assert apart < 1e-6
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


def fresh_model() -> Any:
    return llama()


def afterwards(folder: str) -> Any:
    """Evaluate before training, train twice, generate, and start again with model_init."""
    from transformers import TrainerCallback

    seen = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            norm = xds.zero.get_full_grad(model.lm_head.weight).norm().item()
            seen.append(norm)

    world_size = dist.get_world_size()
    done = trainer(folder, world_size, xds_config=config_of(3), callbacks=[Watch()])
    before = done.evaluate()["eval_loss"]
    done.train()
    first = done.engine
    done.train()
    assert done.engine is first
    rank = dist.get_rank()
    prompt = torch.arange(3, 6 + rank).view(1, -1)
    tokens = done.model.generate(
        prompt, max_new_tokens=4 + rank, do_sample=False, synced_gpus=True, pad_token_id=0
    )
    done.engine.destroy()
    assert torch.equal(
        tokens,
        done.model.generate(prompt, max_new_tokens=4 + rank, do_sample=False, pad_token_id=0),
    )
    fresh = trainer(folder, world_size, xds_config=config_of(3), model_init=fresh_model)
    fresh.train()
    fresh.train()
    again = curve(fresh)
    fresh.engine.destroy()
    return before, curve(done), again, len(seen)


def test_what_people_do_before_and_after_training_works_at_stage_3(tmp_path):
    alone = trainer(tmp_path / "plain")
    untrained = alone.evaluate()["eval_loss"]
    alone.train()
    alone.train()
    fresh = trainer(tmp_path / "fresh", model_init=fresh_model)
    fresh.train()
    fresh.train()
    for before, twice, again, seen in warm(2).run(afterwards, str(tmp_path)):
        assert before == pytest.approx(untrained, rel=1e-5)
        close([twice], [curve(alone)])
        close([again], [curve(fresh)])
        assert seen == 12


def translate(folder: str, stage: int | None) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    from xds.engine.integrations.huggingface import Seq2SeqTrainer, Seq2SeqTrainingArguments

    torch.manual_seed(1)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=61,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    args = Seq2SeqTrainingArguments(
        folder,
        per_device_train_batch_size=4 if stage is None else 2,
        per_device_eval_batch_size=2,
        max_steps=3,
        learning_rate=1e-2,
        predict_with_generate=True,
        generation_max_length=8,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        xds_config=None if stage is None else config_of(stage),
    )
    done = Seq2SeqTrainer(model, args, train_dataset=Tokens(24), eval_dataset=Tokens(12))
    done.train()
    predicted = done.predict(Tokens(8, 9)).predictions.tolist()
    if stage is not None:
        done.engine.destroy()
    return predicted


@pytest.mark.parametrize("stage", [1, 3])
def test_a_seq2seq_trainer_predicts_by_generating(stage, tmp_path):
    expected = translate(str(tmp_path), None)
    for predicted in warm(2).run(translate, str(tmp_path), stage):
        assert predicted == expected
