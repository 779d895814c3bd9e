// The interface of the CPU kernels that pack elements into bits and small integers, for every instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace xds {

// Ranges [begin, end) begin at a multiple of 1024 elements, and of a block.
struct BlockKernels {
  // The sum of |value + error|, or of their squares.
  double (*sum_sizes)(const void* value, Kind kind, const float* error, bool squares, int64_t begin, int64_t end);
  // The signs of value + error, and what is left without scale * sign in `error`; nothing if scale is not finite.
  void (*sign_pack)(const void* value, Kind kind, float* error, uint8_t* signs, float scale, int64_t begin,
                    int64_t end);
  // out = factor * the sum over parts of scale * sign. Strides are those between parts, in elements.
  void (*sign_unpack)(const uint8_t* signs, int64_t sign_stride, const float* scales, int64_t scale_stride,
                      int64_t parts, int64_t block, void* out, Kind kind, float factor, int64_t begin, int64_t end);
  // One block as integers of 8 or 4 bits; returns what is stored as its largest magnitude.
  float (*quantize)(const void* flat, Kind kind, uint8_t* values, float* error, int bits, int64_t begin,
                    int64_t end);
  // out = factor * the sum over parts of magnitude * integer.
  void (*dequantize)(const uint8_t* values, int64_t value_stride, const float* absmax, int64_t absmax_stride,
                     int64_t parts, int64_t block, int bits, void* out, Kind kind, float factor, int64_t begin,
                     int64_t end);
};

namespace baseline {
extern const BlockKernels block_kernels;
}
namespace avx2 {
extern const BlockKernels block_kernels;
}
namespace avx512 {
extern const BlockKernels block_kernels;
}

}  // namespace xds
