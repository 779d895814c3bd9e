"""The release of DeepSpeed whose names, defaults and meanings are implemented, and its package's name."""

ALIAS = "deepspeed"
VERSION = "0.19.8"
