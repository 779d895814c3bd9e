// Stochastic rounding to 16 bits: see ops/rounding.py, and cpu/narrow.h, which have the same arithmetic.
#pragma once

#include "common.cuh"

namespace xds {

// rows [num_rows][3], null where values are rounded to nearest: the first element of a run, its index in the
// parameter, and the parameter's key.
struct Draws {
  const int64_t* rows = nullptr;
  int64_t num_rows = 0;
};

__device__ inline uint32_t word_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

__device__ inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// The random numbers of the elements that one thread visits in rising order.
class Drawer {
 public:
  __device__ Drawer(const Draws& draws, float step) : draws_(draws), step_(static_cast<uint32_t>(step)) {}

  __device__ bool is_on() const { return draws_.rows != nullptr; }

  // 16 bits; one hash has those of two neighbours.
  __device__ uint32_t at(int64_t element) {
    if (element < begin_ || element >= end_) find(element);
    const uint32_t index = first_ + static_cast<uint32_t>(element);
    return (mixed((index >> 1) ^ key_) >> (16 * (index & 1))) & 0xffffu;
  }

 private:
  __device__ void find(int64_t element) {
    int64_t low = 0, high = draws_.num_rows;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (draws_.rows[3 * middle] <= element) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t* row = draws_.rows + 3 * low;
    begin_ = low == 0 ? 0 : row[0];
    end_ = low + 1 < draws_.num_rows ? row[3] : INT64_MAX;
    first_ = static_cast<uint32_t>(row[1] - row[0]);
    const uint64_t key = static_cast<uint64_t>(row[2]);
    key_ = mixed(static_cast<uint32_t>(key) + step_ * 0x9e3779b9u) ^ static_cast<uint32_t>(key >> 32);
  }

  Draws draws_;
  uint32_t step_;
  int64_t begin_ = 0, end_ = 0;  // of the run whose key is known
  uint32_t first_ = 0, key_ = 0;
};

// To T by the lowest bits of `draw`; a wider T keeps the value.
template <class T>
__device__ inline T rounded_by(float value, uint32_t) {
  return static_cast<T>(value);
}

template <>
__device__ inline BFloat16 rounded_by<BFloat16>(float value, uint32_t draw) {
  const uint32_t bits = word_of(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return static_cast<BFloat16>(value);
  const unsigned short chosen = static_cast<unsigned short>((bits + draw) >> 16);
  BFloat16 result;
  memcpy(&result, &chosen, sizeof(result));
  return result;
}

template <>
__device__ inline Half rounded_by<Half>(float value, uint32_t draw) {
  const uint32_t bits = word_of(value), magnitude = bits & 0x7fffffffu, part = draw & 0x1fffu;
  if (magnitude >= 0x47800000u) return static_cast<Half>(value);
  uint32_t found = (magnitude - (112u << 23) + part) >> 13;
  if (found > 0x7bffu) found = 0x7bffu;
  if (magnitude < 0x38800000u) {
    float size;
    memcpy(&size, &magnitude, sizeof(size));
    // products by powers of 2 are exact, so that a fused multiply-add changes nothing
    found = static_cast<uint32_t>(size * 0x1p24f + static_cast<float>(part) * 0x1p-13f);
  }
  const unsigned short chosen = static_cast<unsigned short>(((bits >> 16) & 0x8000u) | found);
  Half result;
  memcpy(&result, &chosen, sizeof(result));
  return result;
}

}  // namespace xds
