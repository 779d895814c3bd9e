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

inline int32_t signed_bits_of(float value) { return static_cast<int32_t>(bits_of(value)); }

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
  const int32_t base = base_of(row);
  if (base == 0) {
    for (int64_t i = 0; i < ROW_NUMEL; ++i) squares[i] = 0.0f;
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < ROW_NUMEL; ++i) squares[i] = float_of(static_cast<uint32_t>((base + row[i]) << 20));
}

// The base of a row with these values, which it writes. Values that are not finite count as the largest one.
template <int32_t LEVELS>
inline int32_t put_base(const float* __restrict values, uint8_t* row) {
  int32_t largest = 0;
  for (int64_t i = 0; i < ROW_NUMEL; ++i) {
    const int32_t bits = signed_bits_of(values[i]) & INT32_MAX;
    largest = bits > largest ? bits : largest;
  }
  const int32_t exponent = (largest < LARGEST ? largest : LARGEST) >> 23;
  const int32_t above = 8 * (exponent + 1) - LEVELS;
  const int32_t base = exponent == 0 ? 0 : above < 8 ? 8 : above;
  __builtin_memcpy(row + ROW_NUMEL, &base, sizeof(base));
  return base;
}

// The magnitude of the code of a value. draw: 16 random bits.
template <int32_t LEVELS>
inline int32_t size_of(float value, int32_t base, int32_t part) {
  const int32_t bits = signed_bits_of(value) & INT32_MAX;
  const int32_t size = (((bits < LARGEST ? bits : LARGEST) + part) >> 20) - base;
  return size < 0 ? 0 : size < LEVELS ? size : LEVELS - 1;
}

template <int32_t LEVELS, bool BY_DRAWS>
inline void encode_row(const float* __restrict values, const uint16_t* __restrict draws, uint8_t* __restrict row) {
  const int32_t base = put_base<LEVELS>(values, row);
  if (base == 0) {
    for (int64_t i = 0; i < ROW_NUMEL; ++i) row[i] = 0;
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < ROW_NUMEL; ++i) {
    const int32_t part = BY_DRAWS ? (int32_t{draws[i]} << 4) + 8 : 1 << 19;
    const int32_t size = size_of<LEVELS>(values[i], base, part);
    row[i] = static_cast<uint8_t>(LEVELS == MEAN_LEVELS && values[i] < 0.0f ? -size : size);
  }
}

// draws [256]: 16 random bits for each element, or nullptr: to nearest.
template <int32_t LEVELS>
inline void encode(const float* values, const uint16_t* draws, uint8_t* row) {
  draws != nullptr ? encode_row<LEVELS, true>(values, draws, row) : encode_row<LEVELS, false>(values, draws, row);
}

}  // namespace
