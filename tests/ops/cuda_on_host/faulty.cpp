// Kernels that are wrong on a GPU, one fault each, and one that is right: what the runtime in this folder has to find.
#include "cuda_runtime.h"

constexpr unsigned kThreads = 64;

template <int kFault>
__global__ void shift(unsigned* out) {
  __shared__ unsigned values[kThreads];
  const unsigned mine = threadIdx.x, next = (mine + 1) % kThreads;
  if (kFault != 1) values[mine] = mine;
  if (kFault == 3) __shfl_xor_sync(0xffffffffu, mine, 1);
  if (kFault == 4) __syncwarp();
  if (kFault != 2 && kFault != 3 && kFault != 4) __syncthreads();
  out[kFault == 5 ? mine : blockIdx.x * kThreads + mine] = values[next];
  if (kFault == 6 && mine != 40) __shfl_xor_sync(0xffffffffu, mine, 1);
  if (kFault == 7) __shfl_xor_sync(0xffffu, mine, 1);
}

template <int kFault>
const char* result() {
  cudaLaunchConfig_t config;
  config.gridDim = dim3(kFault == 8 ? 0 : 2);
  config.blockDim = dim3(kFault == 9 ? 48 : kThreads);
  unsigned* const out = new unsigned[2 * kThreads];
  const cudaError_t error = cudaLaunchKernelEx(&config, &shift<kFault>, out);
  delete[] out;
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

extern "C" const char* xds_result(int fault) {
  using Result = const char* (*)();
  static const Result results[] = {
      result<0>, result<1>, result<2>, result<3>, result<4>, result<5>, result<6>, result<7>, result<8>, result<9>};
  return results[fault]();
}
