// A CUDA runtime for tests without a GPU: kernels run on the host, over host memory, one block at a time.
//
// Found first on the include path, in place of CUDA's own header. What a launch, a barrier and an access do is in
// runtime.cpp; g++ -fsanitize=thread calls it at each access of a kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1) : x(x) {}
};

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
constexpr int cudaDevAttrMultiProcessorCount = 16;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace host {

struct Indices {
  dim3 thread, block, grid, threads;
};

extern Indices here;
extern int multiprocessors;
extern int64_t questions;

cudaError_t run(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& body);
uint64_t exchange(unsigned mask, uint64_t bits, unsigned from_lane);
unsigned lane();

template <class Value>
Value exchange_value(unsigned mask, Value value, unsigned from_lane) {
  static_assert(sizeof(Value) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(value));
  bits = exchange(mask, bits, from_lane);
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace host

inline const dim3 &threadIdx = host::here.thread, &blockIdx = host::here.block, &gridDim = host::here.grid;

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);

const char* cudaGetErrorString(cudaError_t);

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  ++host::questions;
  *value = host::multiprocessors;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, int) {
  *blocks = 2;
  return cudaSuccess;
}

inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int other) {
  return host::exchange_value(mask, value, host::lane() ^ other);
}

template <class Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned apart) {
  const unsigned lane = host::lane();
  return host::exchange_value(mask, value, lane + apart < 32 ? lane + apart : lane);
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  return host::run(*config, reinterpret_cast<const void*>(kernel), [&] { kernel(arguments...); });
}
