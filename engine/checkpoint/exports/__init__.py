"""Exports checkpoints to safetensors, a torch file, or torch.distributed.checkpoint."""
