"""One optimizer step: micro-batches, forward, backward, clipping, the update."""
