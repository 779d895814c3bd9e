"""A checkpoint becomes what other programs read: safetensors, a torch file, torch.distributed.checkpoint."""
