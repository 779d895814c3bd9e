"""Each rank's part of a dataset, and a batch on its way into the module."""
