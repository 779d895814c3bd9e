"""Model preparation: sharded construction, checks across ranks, casting, recomputation, torch.compile."""
