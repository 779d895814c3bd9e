"""Pipeline parallelism: which units this rank has."""
