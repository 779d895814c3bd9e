"""Files of weights: the header of safetensors, and a reader of what other programs saved."""
