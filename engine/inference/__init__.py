"""`xds.init_inference`: a model that only infers, in slices, in few bits, or streamed from host memory."""
