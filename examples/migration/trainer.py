"""A stock transformers script with a DeepSpeed config; without --deepspeed the Trainer uses DDP.

xds --as-deepspeed examples/migration/trainer.py --deepspeed examples/migration/zero3.json
torchrun --nproc-per-node 2 examples/migration/trainer.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", default=None)
parser.add_argument("--output", default="out/trainer")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
training = TrainingArguments(
    args.output,
    deepspeed=args.deepspeed,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    max_steps=args.steps,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 64, (256, 16))
dataset = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model=model, args=training, train_dataset=dataset)
result = trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    print(f"loss {result.training_loss:.4f}")
trainer.accelerator.end_training()  # ends the process group, as PyTorch advises
