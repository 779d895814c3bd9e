// A CUDA runtime for tests without a GPU: kernels run on the host, over host memory, one block at a time.
//
// A block's threads are fibers of one thread. One runs until it reaches a barrier or its end, then the next;
// so a barrier that not all of a block reach, or a value read before its barrier, shows as a wrong result or
// as "a barrier some never reached". Found first on the include path, in place of CUDA's own header.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

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

inline dim3 threadIdx, blockIdx, gridDim, blockDim;

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
constexpr int cudaDevAttrMultiProcessorCount = 16;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline int multiprocessors = 3;
inline int64_t launches = 0, questions = 0;

inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  ++questions;
  *value = multiprocessors;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, int) {
  *blocks = 2;
  return cudaSuccess;
}

namespace host {

constexpr size_t kStack = 64 << 10;

struct Fiber {
  ucontext_t context = {};
  std::unique_ptr<char[]> stack{new char[kStack]};
  int64_t block_barriers = 0, warp_barriers = 0;
  bool is_done = false;
};

struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler = {};
  unsigned running = 0;
  std::function<void()> body;
  double exchange[1024] = {};
};

inline Block block;

inline void begin() {
  block.body();
  block.fibers[block.running].is_done = true;
  swapcontext(&block.fibers[block.running].context, &block.scheduler);
}

inline void step_aside() { swapcontext(&block.fibers[block.running].context, &block.scheduler); }

// Whether everybody in [first, stop) has come to as many barriers as this fiber.
inline bool all_came(int64_t Fiber::*count, unsigned first, unsigned stop) {
  for (unsigned at = first; at < stop; ++at) {
    const Fiber& fiber = block.fibers[at];
    if (!fiber.is_done && fiber.*count < block.fibers[block.running].*count) return false;
  }
  return true;
}

inline void wait(int64_t Fiber::*count, unsigned first, unsigned stop) {
  ++(block.fibers[block.running].*count);
  step_aside();
  for (int64_t tries = 0; !all_came(count, first, stop); ++tries) {
    if (tries > 1'000'000) {
      std::fputs("a barrier some never reached\n", stderr);
      std::abort();
    }
    step_aside();
  }
}

inline void run_block(unsigned threads) {
  if (block.fibers.size() != threads) block.fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : block.fibers) {
    fiber.block_barriers = fiber.warp_barriers = 0;
    fiber.is_done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, begin, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (unsigned at = 0; at < threads; ++at) {
      if (block.fibers[at].is_done) continue;
      any = true;
      block.running = at;
      threadIdx = dim3(at);
      swapcontext(&block.scheduler, &block.fibers[at].context);
    }
  }
}

}  // namespace host

inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline void __syncthreads() { host::wait(&host::Fiber::block_barriers, 0, blockDim.x); }

inline double __shfl_xor_sync(unsigned, double value, int other) {
  const unsigned me = host::block.running, first = me / 32 * 32;
  host::block.exchange[me] = value;
  host::wait(&host::Fiber::warp_barriers, first, first + 32);
  const double theirs = host::block.exchange[me ^ other];
  host::wait(&host::Fiber::warp_barriers, first, first + 32);
  return theirs;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  ++launches;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  host::block.body = [&] { kernel(arguments...); };
  for (unsigned at = 0; at < gridDim.x; ++at) {
    blockIdx = dim3(at);
    host::run_block(blockDim.x);
  }
  return cudaSuccess;
}
