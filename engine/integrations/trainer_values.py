"""Config values from TrainingArguments: the same keys that transformers fills in for DeepSpeed."""

from __future__ import annotations

from typing import Any

from .given import Given, Source, precision

ADAMS = ("adam", "adamw")  # the optimizers for which the arguments' betas and eps apply


def _named(args: Any, name: str, *, is_default: bool = False) -> Given:
    return Given(getattr(args, name), f"TrainingArguments.{name}", is_default=is_default)


def argument_values(source: Source, args: Any) -> dict[str, Given]:
    """All values except the schedule's steps and the model's width, which are known later."""
    steps = args.gradient_accumulation_steps
    micro = args.per_device_train_batch_size
    ranks = source.data_ranks(args.world_size)
    named = "ranks" if ranks == args.world_size else "data-parallel ranks"
    product = f"({micro} x {steps} x {ranks})"
    return {
        "train_micro_batch_size_per_gpu": _named(
            args, "per_device_train_batch_size", is_default=True
        ),
        "gradient_accumulation_steps": _named(args, "gradient_accumulation_steps", is_default=True),
        "train_batch_size": Given(
            micro * steps * ranks,
            f"per_device_train_batch_size x gradient_accumulation_steps x {named} {product}",
        ),
        "gradient_clipping": _named(args, "max_grad_norm", is_default=True),
        **precision(source, bf16=_named(args, "bf16"), fp16=_named(args, "fp16"), is_default=True),
        **_optimizer_values(source, args),
        **_compile_values(args),
    }


def _compile_values(args: Any) -> dict[str, Given]:
    if not args.torch_compile:
        return {}
    values = {
        "enabled": True,
        "backend": args.torch_compile_backend,
        "mode": args.torch_compile_mode,
    }
    return {
        f"compile.{key}": Given(value, is_checked=False, is_default=True)
        for key, value in values.items()
        if value is not None
    }


def _optimizer_values(source: Source, args: Any) -> dict[str, Given]:
    if not source.has_section("optimizer"):
        return {}
    is_adam = str(source.get("optimizer.type")).casefold() in ADAMS
    return {
        "optimizer.params.lr": _named(args, "learning_rate", is_default=True),
        "optimizer.params.weight_decay": _named(args, "weight_decay", is_default=True),
        "optimizer.params.betas": Given(
            [args.adam_beta1, args.adam_beta2],
            "[TrainingArguments.adam_beta1, adam_beta2]",
            is_default=is_adam,
        ),
        "optimizer.params.eps": _named(args, "adam_epsilon", is_default=is_adam),
    }


def schedule_values(args: Any, num_training_steps: int | None) -> dict[str, Given]:
    """The schedule's values. None: the number of steps is not known yet, and is not checked."""
    is_known = num_training_steps is not None
    steps = num_training_steps or 1
    return {
        "scheduler.params.warmup_min_lr": Given(0, is_checked=False),
        "scheduler.params.warmup_max_lr": _named(args, "learning_rate"),
        "scheduler.params.total_num_steps": Given(steps, "the number of training steps", is_known),
        "scheduler.params.warmup_num_steps": Given(
            max(1, args.get_warmup_steps(steps)), "TrainingArguments.warmup_steps", is_known
        ),
    }
