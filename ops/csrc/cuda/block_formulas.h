// The arithmetic of one element of block quantisation and of packed signs, for the device and, in tests, for
// the host. Every product and sum is rounded separately, so the bytes equal those of the torch reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef XDS_BOTH
#ifdef __CUDACC__
#define XDS_BOTH __host__ __device__ inline
#else
#define XDS_BOTH inline
#endif
#endif

namespace xds {

constexpr float kSmallest = 7.888609052210118e-31f;  // 2^-100: levels / absmax stays finite
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it has a whole number in its low bits

// The compiler must not fuse these to a multiply-add (on the host: -ffp-contract=off).
XDS_BOTH float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

XDS_BOTH float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

XDS_BOTH uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

XDS_BOTH float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

// |value| as an integer: ordered like magnitudes, with inf and then nan as the largest, so a maximum keeps them.
XDS_BOTH uint32_t magnitude_of(float value) { return bits_of(value) & 0x7fffffffu; }

template <int kBits>
constexpr float kLevels = kBits == 8 ? 127.0f : 7.0f;

template <int kBits>
constexpr float kStep = static_cast<float>(1.0 / (kBits == 8 ? 127.0 : 7.0));

struct Magnitude {
  float absmax;   // what is stored: nan for a block with inf or nan
  float inverse;  // levels / absmax, 0 where nothing is to be seen
  bool is_finite;
};

template <int kBits>
XDS_BOTH Magnitude magnitude(uint32_t largest) {
  if (largest >= kInfinity) return {float_of(0x7fc00000u), 0.0f, false};
  const float absmax = float_of(largest);
  if (absmax < kSmallest) return {0.0f, 0.0f, true};
  return {absmax, kLevels<kBits> / absmax, true};
}

// round(value * inverse), half to even, as a float with that number in its low bits (two's complement).
// For inf and nan it is 0.
XDS_BOTH float rounded(float value, const Magnitude& block) {
  const float whole = plus(times(value, block.inverse), kMagic);
  return block.is_finite || magnitude_of(value) < kInfinity ? whole : kMagic;
}

// The dequantised value.
template <int kBits>
XDS_BOTH float restored(float whole, float absmax) {
  return times(times(whole, kStep<kBits>), absmax);
}

// The low kBits of N rounded values, the earliest lowest.
template <int kBits, int N>
XDS_BOTH uint64_t packed(const float (&whole)[N]) {
  uint64_t word = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
    word |= static_cast<uint64_t>(bits_of(whole[i]) & ((1u << kBits) - 1)) << (kBits * i);
  return word;
}

// The i-th of packed values as a float. With its sign bit flipped it is an offset from the lowest value, which
// as the low bits of 2^23 needs no conversion.
template <int kBits>
XDS_BOTH float unpacked(uint64_t word, int i) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  const uint32_t count = (static_cast<uint32_t>(word >> (kBits * i)) & (2 * kSign - 1)) ^ kSign;
  return plus(float_of(0x4b000000u | count), -(8388608.0f + kSign));
}

// Bit i is set where the i-th value's sign bit is not.
template <int N>
XDS_BOTH uint32_t sign_bits(const float (&values)[N]) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) word |= (~bits_of(values[i]) >> 31) << i;
  return word;
}

// scale where bit i is set, else -scale.
XDS_BOTH float signed_scale(uint32_t word, int i, float scale) {
  return float_of(bits_of(scale) ^ ((~word >> i) << 31));
}

// The contribution of an element to its block's scale, and the scale for the sum of the contributions.
XDS_BOTH double size_of(float value, bool root_mean_square) {
  const double wide = value;
  return root_mean_square ? wide * wide : fabs(wide);
}

XDS_BOTH float scale_of(double sum, int64_t count, bool root_mean_square, float gain) {
  const double mean = sum / static_cast<double>(count);
  return times(static_cast<float>(root_mean_square ? sqrt(mean) : mean), gain);
}

}  // namespace xds
