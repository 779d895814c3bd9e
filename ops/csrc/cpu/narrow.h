// Converts fp32 to and from bf16 and fp16, rounded to nearest even or by a random number, in integer arithmetic that
// compilers vectorise.
//
// No processor-specific instruction is used, so all instruction sets give the same bits. Flushing denormals
// (torch.set_flush_denormal) does not change them.
#pragma once

#include <cstdint>

namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float from_bf16(uint16_t half) { return float_of(uint32_t{half} << 16); }

inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Of the two neighbours of a value, the further one with the probability of its share of the way: the expectation is
// the value. `draw`: 16 random bits.
inline uint16_t to_bf16_by(float value, uint32_t draw) {
  const uint32_t bits = bits_of(value);
  const uint32_t chosen = (bits + draw) >> 16;  // inf stays: its lower bits are 0
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : chosen);
}

inline float from_fp16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);  // the exponent's bias: 127 instead of 15
  const uint32_t special = (magnitude << 13) | 0x7f800000;  // inf and nan
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t found = magnitude >= 0x7c00 ? special : magnitude < 0x0400 ? small : normal;
  return float_of(sign | found);
}

inline uint16_t to_fp16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // below 2^-14 the sum with 0.5 rounds to multiples of 2^-24, which are its lowest bits
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t found = magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? small : normal;
  return static_cast<uint16_t>(sign | found);
}

// As `to_bf16_by`. A value above the largest one of fp16, and below the next power of two, becomes the largest one.
inline uint16_t to_fp16_by(float value, uint32_t draw) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t part = draw & 0x1fff;
  const uint32_t next = (magnitude - (112u << 23) + part) >> 13;
  const uint32_t normal = next < 0x7c00 ? next : 0x7bff;
  // below 2^-14 in units of 2^-24
  const float units = float_of(magnitude < 0x38800000 ? magnitude : 0) * 0x1p24f + static_cast<float>(part) * 0x1p-13f;
  const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(units));
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t found = magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? small : normal;
  return static_cast<uint16_t>(sign | found);
}

// The value of two halves, and the upper half of a value: see ops/halves.py.
inline float joined(uint16_t high, uint16_t low) {
  const uint32_t upper = high, below = low >> 15;  // below: the value is closer to 0 than `high`
  const uint32_t found = ((upper - below) << 16) | low;
  return float_of((upper & 0x7fff) - 1 < 0x7f7f + below ? found : upper << 16);
}

inline uint16_t upper_half(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x8000) >> 16);
}

// A hash of 32 bits that can be inverted: two rounds of xor-shift and multiply.
// Source: Wellons, Prospecting for Hash Functions, 2018, the function lowbias32.
inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// The key of a run of elements in one step; mixed(index / 2 ^ key) has the numbers of two elements.
inline uint32_t key_of_step(int64_t key, uint32_t step) {
  const uint64_t bits = static_cast<uint64_t>(key);
  return mixed(static_cast<uint32_t>(bits) + step * 0x9e3779b9u) ^ static_cast<uint32_t>(bits >> 32);
}

}  // namespace
