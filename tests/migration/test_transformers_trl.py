"""`class T(TrainerMixin, SFTTrainer)`: a subclass of the Trainer on an engine, and the line that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
import transformers
from huggingface_runs import VOCAB, Tokens, arguments, config_of, llama, logged, trainer
from warm_ranks import warm

from xds.engine.integrations.huggingface import TrainerMixin

pytestmark = pytest.mark.filterwarnings("default")  # the packages warn about themselves
KEYS = ("loss", "grad_norm", "mean_token_accuracy")


class Counting(transformers.Trainer):  # type: ignore[misc]
    """Overrides what TRL's trainers override: the loss, which counts over all ranks, and the log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hits: list[float] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        right = outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]
        self.hits.append(self.accelerator.gather_for_metrics(right).float().mean().item())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        found = {KEYS[-1]: sum(self.hits) / len(self.hits)} if self.hits else {}
        self.hits.clear()
        super().log({**logs, **found}, start_time)


class CountingOnEngine(TrainerMixin, Counting):
    pass


def make_counting(folder: str, world_size: int, config: Any) -> Any:
    given = (llama(), arguments(folder, world_size))
    if config is None:
        return Counting(*given, train_dataset=Tokens(24))
    return CountingOnEngine(*given, train_dataset=Tokens(24), xds_config=config)


def make_sft(folder: str, world_size: int, config: Any) -> Any:
    """TRL's SFTTrainer, on texts that are tokens already."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer

    class OnEngine(TrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "w0")), pad_token="w0", eos_token="w1"
    )
    args = SFTConfig(
        folder,
        per_device_train_batch_size=4 // world_size,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        bf16=False,
        max_length=None,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    given: dict[str, Any] = {
        "train_dataset": Dataset.from_dict({"input_ids": Tokens(24).tokens.tolist()}),
        "processing_class": tokenizer,
    }
    if config is None:
        return SFTTrainer(llama(), args, **given)
    return OnEngine(llama(), args, **given, xds_config=config)


def train(make: Any, folder: str, config: Any) -> Any:
    """What was logged, and the weights of the saved model."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    done = make(folder, world_size, config)
    done.train()
    done.save_model(folder)
    if world_size > 1:
        dist.barrier()
    saved = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    return logged(done, *KEYS), saved


@pytest.mark.contract
@pytest.mark.parametrize("make", [make_counting, make_sft])
def test_a_subclass_of_the_trainer_trains_on_an_engine_as_without(
    make: Any, tmp_path: Path
) -> None:
    if make is make_sft:
        pytest.importorskip("trl")
    expected, weights = train(make, str(tmp_path / "plain"), None)
    results = warm(2).run(train, make, str(tmp_path / "engine"), config_of(3))
    for found, saved in results:
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=2e-5
        )
        for name, value in weights.items():
            torch.testing.assert_close(saved[name], value, rtol=2e-5, atol=2e-6)


def test_a_trainer_without_xds_config_prints_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, max_steps=1).train()
    assert "xds" not in capsys.readouterr().out
