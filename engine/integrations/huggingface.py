"""Removed in 0.2.0: the stock classes train on an engine, with a DeepSpeed config (docs/migration.md)."""

raise ImportError(
    "xds.engine.integrations.huggingface is removed: use transformers.Trainer with "
    "TrainingArguments(deepspeed=...), and start the script with `xds --as-deepspeed`, see docs/migration.md"
)
