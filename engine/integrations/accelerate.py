"""Removed in 0.2.0: the stock classes train on an engine, with a DeepSpeed config (docs/migration.md)."""

raise ImportError(
    "xds.engine.integrations.accelerate is removed: use accelerate's own Accelerator with a DeepSpeedPlugin, "
    "and start the script with `xds --as-deepspeed`, see docs/migration.md"
)
