// Reads and writes rows of 256 codes of 8 bits: see ops/coded.py, which has the same arithmetic.
#pragma once

#include <cstdint>

#include "narrow.h"

namespace {

constexpr int64_t ROW_NUMEL = 256;
constexpr int64_t ROW_BYTES = ROW_NUMEL + 4;
constexpr int32_t MEAN_LEVELS = 128, SQUARE_LEVELS = 256;  // 8 of each exponent
constexpr int32_t LARGEST = 0x7f7fffff;  // finite

inline int32_t base_of(const uint8_t* row) {
  int32_t base;
  __builtin_memcpy(&base, row + ROW_NUMEL, sizeof(base));
  return base;
}

inline int32_t size_bits_of(float value) { return static_cast<int32_t>(bits_of(value)) & INT32_MAX; }

inline void decode_means(const uint8_t* __restrict row, float* __restrict means) {
  const int32_t base = base_of(row);
  const int8_t* __restrict codes = reinterpret_cast<const int8_t*>(row);
#pragma GCC ivdep
  for (int64_t i = 0; i < ROW_NUMEL; ++i) {
    const int32_t code = codes[i];
    const int32_t size = code < 0 ? -code : code;
    const int32_t bits = ((base + size) << 20) | (code & INT32_MIN);
    means[i] = float_of(static_cast<uint32_t>(code == 0 ? 0 : bits));
  }
}

inline void decode_squares(const uint8_t* __restrict row, float* __restrict squares) {
  const int32_t base = base_of(row), mask = base == 0 ? 0 : -1;
#pragma GCC ivdep
  for (int64_t i = 0; i < ROW_NUMEL; ++i) {
    squares[i] = float_of(static_cast<uint32_t>(((base + row[i]) << 20) & mask));
  }
}

// The base of a row with these values. Those that are not finite count as the largest one.
template <int32_t LEVELS>
inline int32_t base_for(const float* __restrict values) {
  int32_t largest = 0;
  for (int64_t i = 0; i < ROW_NUMEL; ++i) {
    const int32_t bits = size_bits_of(values[i]);
    largest = bits > largest ? bits : largest;
  }
  const int32_t exponent = (largest < LARGEST ? largest : LARGEST) >> 23;
  const int32_t above = 8 * (exponent + 1) - LEVELS;
  return exponent == 0 ? 0 : above < 8 ? 8 : above;
}

// The magnitude of the code of a value. draw: 16 random bits.
template <int32_t LEVELS>
inline int32_t size_of(float value, int32_t base, int32_t draw) {
  const int32_t size = (((size_bits_of(value) >> 4) + draw) >> 16) - base;
  return size < 0 ? 0 : size < LEVELS ? size : LEVELS - 1;
}

// A row of these values. draws [256]: 16 random bits for each.
template <int32_t LEVELS, bool BY_DRAWS>
inline void encode_row(const float* __restrict values, const uint16_t* __restrict draws, uint8_t* __restrict row) {
  const int32_t base = base_for<LEVELS>(values);
  __builtin_memcpy(row + ROW_NUMEL, &base, sizeof(base));
  const int32_t above = base == 0 ? 1 << 12 : base;  // of a row of zeros all codes are 0
#pragma GCC ivdep
  for (int64_t i = 0; i < ROW_NUMEL; ++i) {
    const int32_t size = size_of<LEVELS>(values[i], above, BY_DRAWS ? int32_t{draws[i]} : 1 << 15);
    row[i] = static_cast<uint8_t>(LEVELS == MEAN_LEVELS && values[i] < 0.0f ? -size : size);
  }
}

}  // namespace
