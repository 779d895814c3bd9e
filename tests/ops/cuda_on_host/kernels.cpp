// The CUDA kernels for the host: their sources as they are, over the runtime in this folder.
#include <algorithm>

#include "adagrad.cu"
#include "adam.cu"
#include "decide.cu"
#include "lamb.cu"
#include "lion.cu"
#include "sgd.cu"
#include "square_sum.cu"

using std::max;

inline unsigned __shfl_down_sync(unsigned, unsigned value, int apart) {
  const unsigned me = host::block.running, first = me / 32 * 32;
  host::block.exchange[me] = value;
  host::wait(&host::Fiber::warp_barriers, first, first + 32);
  const unsigned from = me + apart < first + 32 ? me + apart : me;
  const double theirs = host::block.exchange[from];
  host::wait(&host::Fiber::warp_barriers, first, first + 32);
  return static_cast<unsigned>(theirs);
}

#include "quantize.cu"
#include "signs.cu"
#include "torch_on_host.h"
