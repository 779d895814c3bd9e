// The CUDA optimizers for the host: their sources as they are, over the runtime in this folder.
#include "adagrad.cu"
#include "adam.cu"
#include "decide.cu"
#include "lamb.cu"
#include "lion.cu"
#include "sgd.cu"
#include "square_sum.cu"
#include "torch_on_host.h"
