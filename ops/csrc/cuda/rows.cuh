// Sums whose order depends on the length only: rows of fixed length, each summed by one block in fp64.
//
// Element i of a row belongs to thread (i / 4) % 256, whether it is read in a pack or alone, so neither the
// address nor the number of multiprocessors changes a bit. All sums are in fp64: an H200 converts and adds more
// elements per second than its memory delivers, and fp32 squares would overflow from 1.8e19 on.
#pragma once

#include "common.cuh"

namespace xds {

constexpr int64_t kRow = 8192;  // elements; a thread has 32 of them
constexpr int kQuads = kRow / 4 / kThreads;  // packs of four a thread has in a row

// Four neighbours from `at` on, those from `stop` on as 0. packed: the address is aligned for one access.
template <class T>
__device__ inline Pack<T, 4> load_four(const T* from, int64_t at, int64_t stop, bool packed) {
  if (packed && at + 4 <= stop) return load<4>(from + at);
  Pack<T, 4> pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) pack.at[i] = at + i < stop ? from[at + i] : static_cast<T>(0.0f);
  return pack;
}

template <class T>
__device__ inline void store_four(T* to, int64_t at, int64_t stop, bool packed, const Pack<T, 4>& pack) {
  if (packed && at + 4 <= stop) return store<4>(to + at, pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i < stop) to[at + i] = pack.at[i];
  }
}

__device__ inline void store_out_four(
    const Out& out, int64_t at, int64_t stop, bool packed, const Pack<float, 4>& pack) {
  if (packed && at + 4 <= stop) return store_out<4>(out, at, pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i < stop) store_out<1>(out, at + i, Pack<float, 1>{{pack.at[i]}});
  }
}

inline bool fit_packs(std::initializer_list<const Tensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor* tensor) {
    return takes_packs(*tensor, 0, item_bytes(tensor->scalar_type()));
  });
}

template <class T>
__device__ inline double wide(T value) {
  return static_cast<double>(static_cast<float>(value));
}
__device__ inline double wide(double value) { return value; }

// The sum of all threads' values, in a fixed order; thread 0 has the result.
__device__ inline double block_sum(double value) {
  __shared__ double values[kThreads];
  __syncthreads();  // the last sum has been read
  values[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    __syncthreads();
  }
  return values[0];
}

}  // namespace xds
