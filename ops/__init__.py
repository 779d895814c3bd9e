"""Collectives on flat tensors, optimizers of flat shards, native kernels. Imports torch and `utils`."""
