"""The stock transformers.Trainer on xds: train, evaluate, save, resume and generate.

    xds --as-deepspeed examples/huggingface/trainer.py --output_dir /tmp/bytes

The model is created in code and the text is that of examples/gpt: nothing is downloaded. The options are those
of TrainingArguments, and `--architecture`, `--data` and `--context`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from train import HERE, build_model, load_text  # the other example in this folder
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments


@dataclass
class Options:
    architecture: str = field(default="llama", metadata={"choices": ["llama", "gpt2"]})
    data: Path | None = field(default=None, metadata={"help": "a text file to train on"})
    context: int = field(default=128, metadata={"help": "bytes a window"})


class Windows(Dataset):
    """Windows of bytes for a Hugging Face model, which shifts the labels itself."""

    def __init__(self, windows: Dataset) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.windows[index][0]
        return {"input_ids": tokens, "labels": tokens}


class SayLoss(TrainerCallback):
    """Callbacks work without changes; this one runs on rank 0."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs) -> None:
        if state.is_world_process_zero:
            print(f"step {state.global_step}: eval loss {metrics['eval_loss']:.3f}")


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Options))
    parser.set_defaults(
        output_dir="bytes-model",
        deepspeed=str(HERE / "auto3.json"),
        use_cpu=not torch.cuda.is_available(),
        max_steps=100,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=20,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        report_to=[],
    )
    args, options = parser.parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    model = build_model(options.architecture, options.context)
    training, held_out = load_text(options.data, options.context)
    trainer = Trainer(
        model,
        args,
        train_dataset=Windows(training),
        eval_dataset=torch.utils.data.Subset(Windows(held_out), range(min(64, len(held_out)))),
        callbacks=[SayLoss()],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()

    # a sharded model generates on all ranks together
    prompt = torch.tensor([list(b"def ")], device=args.device)
    room = min(60, options.context - prompt.shape[1])
    text = trainer.deepspeed.generate(prompt, max_new_tokens=room, do_sample=False, pad_token_id=0)
    if trainer.is_world_process_zero():
        print("-" * 80, bytes(text[0].tolist()).decode(errors="replace"), "-" * 80, sep="\n")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
