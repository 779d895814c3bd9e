"""Plans a run from shapes alone: who has what, how many bytes it holds and sends."""
