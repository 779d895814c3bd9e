// Divides large copies and sums over torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstring>

namespace xds {

constexpr int64_t GRAIN = 1 << 18;  // minimum number of elements, or of bytes, per thread

// work(begin, end) for parts of [0, count). may_split: the caller is a thread of torch's.
template <class Work>
void split(int64_t count, bool may_split, const Work& work) {
  if (!may_split || count < 2 * GRAIN) {
    work(int64_t{0}, count);
  } else {
    torch::stable::parallel_for(0, count, GRAIN, work);
  }
}

inline void copy_bytes(char* into, const char* from, uint64_t size_bytes, bool may_split) {
  split(static_cast<int64_t>(size_bytes), may_split, [&](int64_t begin, int64_t end) {
    std::memcpy(into + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

}  // namespace xds
