// fp32 values in two halves of 16 bits: see ops/halves.py, and cpu/narrow.h, which has the same arithmetic.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace xds {

// The upper half: a bf16 that is rounded to nearest, from the middle of two to the larger magnitude.
struct Upper {
  unsigned short bits;

  Upper() = default;

  __device__ explicit Upper(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    bits = static_cast<unsigned short>((word & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (word + 0x8000u) >> 16);
  }

  __device__ explicit operator float() const { return joined(0); }

  // The value whose lower half is `low`, which does not count beside a zero, NaN, and inf without a larger finite value.
  __device__ float joined(unsigned short low) const {
    const uint32_t upper = bits, below = low >> 15;  // below: the value is closer to 0 than this half
    const bool counts = (upper & 0x7fffu) - 1 < 0x7f7fu + below;
    const uint32_t word = counts ? ((upper - below) << 16) | low : upper << 16;
    float value;
    memcpy(&value, &word, sizeof(value));
    return value;
  }
};

__device__ inline unsigned short lower_half(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof(word));
  return static_cast<unsigned short>(word);
}

}  // namespace xds
