// The CUDA kernels for the host: their sources as they are, over the runtime in this folder.
#include <algorithm>

using std::max;

#include "adagrad.cu"
#include "adam.cu"
#include "decide.cu"
#include "frozen_adam.cu"
#include "lamb.cu"
#include "lion.cu"
#include "quantize.cu"
#include "sgd.cu"
#include "signs.cu"
#include "square_sum.cu"
#include "torch_on_host.h"
