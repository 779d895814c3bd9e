// Packs elements into bits and small integers on a CPU, for one instruction set, XDS_ISA. See ops/kernels/signs.py
// and ops/kernels/quantize.py for what is computed.
//
// Every product and sum is rounded separately and in one order, so that every instruction set gives the same
// bytes. As in kernels.cpp, the standard library is not used.
#include "blocks.h"
#include "narrow.h"

namespace xds {
namespace XDS_ISA {
namespace {

constexpr int64_t WIDTH = 16;
constexpr int64_t TILE = 1024;  // elements that are widened at a time: 4 KiB
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number, half to even
constexpr float SMALLEST = 7.888609052210118e-31f;  // 2^-100

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Half __attribute__((vector_size(32), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(64)));

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline bool is_finite(float value) { return (bits_of(value) & 0x7fffffffu) < 0x7f800000u; }

inline uint32_t sign_of(float value) { return bits_of(value) & 0x80000000u; }

// `count` elements from `at` on in fp32: in place, or widened into `tile`.
inline const float* widened(const void* data, Kind kind, int64_t at, int64_t count, float* __restrict tile) {
  if (kind == Kind::fp32) return static_cast<const float*>(data) + at;
  const uint16_t* __restrict from = static_cast<const uint16_t*>(data) + at;
  if (kind == Kind::bf16) {
    for (int64_t i = 0; i < count; ++i) tile[i] = from_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) tile[i] = from_fp16(from[i]);
  }
  return tile;
}

inline void narrowed(const float* __restrict from, void* data, Kind kind, int64_t at, int64_t count) {
  if (kind == Kind::fp32) {
    float* __restrict to = static_cast<float*>(data) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    return;
  }
  uint16_t* __restrict to = static_cast<uint16_t*>(data) + at;
  if (kind == Kind::bf16) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = to_fp16(from[i]);
  }
}

// The highest bit of each word, as bit i of the result.
inline uint32_t highest_bits(const Words& words) {
#if defined(__AVX512DQ__)
  typedef int Ints __attribute__((vector_size(64), may_alias));
  return static_cast<uint16_t>(__builtin_ia32_cvtd2mask512(reinterpret_cast<const Ints&>(words)));
#elif defined(__AVX2__)
  const Half* halves = reinterpret_cast<const Half*>(&words);
  return static_cast<uint32_t>(__builtin_ia32_movmskps256(halves[0])) |
         static_cast<uint32_t>(__builtin_ia32_movmskps256(halves[1])) << 8;
#elif defined(__SSE2__)
  typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
  const Four* fours = reinterpret_cast<const Four*>(&words);
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(__builtin_ia32_movmskps(fours[i])) << (4 * i);
  return found;
#else
  uint32_t found = 0;
  for (int i = 0; i < WIDTH; ++i) found |= (words[i] >> 31) << i;
  return found;
#endif
}

// -- signs ------------------------------------------------------------------------------------------------

// Element i of a tile is added to lane i % 8 of sum i / 8 % 2, and the lanes in order at the end.
struct Sum {
  Doubles low = {}, high = {};
  double rest = 0.0;
  double total() const {
    const Doubles both = low + high;
    double found = 0.0;
    for (int lane = 0; lane < 8; ++lane) found = found + both[lane];
    return found + rest;
  }
};

template <bool SQUARES>
inline void add_sizes(Sum& sum, const float* value, const float* error, int64_t count) {
  const Words magnitude = Words{} + 0x7fffffffu;
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    Floats buffer = *reinterpret_cast<const Floats*>(value + i) + *reinterpret_cast<const Floats*>(error + i);
    if (!SQUARES) buffer = reinterpret_cast<Floats>(reinterpret_cast<Words>(buffer) & magnitude);
    const Half* halves = reinterpret_cast<const Half*>(&buffer);
    Doubles low = __builtin_convertvector(halves[0], Doubles);
    Doubles high = __builtin_convertvector(halves[1], Doubles);
    sum.low += SQUARES ? low * low : low;
    sum.high += SQUARES ? high * high : high;
  }
  for (; i < count; ++i) {
    const double one = double{value[i] + error[i]};
    sum.rest = sum.rest + (SQUARES ? one * one : (one < 0 ? -one : one));
  }
}

double sum_sizes(const void* value, Kind kind, const float* error, bool squares, int64_t begin, int64_t end) {
  alignas(64) float tile[TILE];
  Sum sum;
  for (int64_t at = begin; at < end; at += TILE) {
    const int64_t count = least(TILE, end - at);
    const float* from = widened(value, kind, at, count, tile);
    squares ? add_sizes<true>(sum, from, error + at, count) : add_sizes<false>(sum, from, error + at, count);
  }
  return sum.total();
}

inline void pack_tile(const float* value, float* error, uint8_t* signs, float scale, bool writes, int64_t count) {
  const Words sign = Words{} + 0x80000000u, magnitude = Words{} + bits_of(scale);
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    Floats* const kept = reinterpret_cast<Floats*>(error + i);
    const Floats buffer = *reinterpret_cast<const Floats*>(value + i) + *kept;
    const Words words = reinterpret_cast<Words>(buffer);
    const uint32_t bits = ~highest_bits(words);
    signs[i / 8] = static_cast<uint8_t>(bits);
    signs[i / 8 + 1] = static_cast<uint8_t>(bits >> 8);
    if (writes) *kept = buffer - reinterpret_cast<Floats>((words & sign) ^ magnitude);
  }
  for (; i < count; i += 8) {
    uint32_t bits = 0;
    for (int64_t j = 0; j < least(8, count - i); ++j) {
      const float buffer = value[i + j] + error[i + j];
      bits |= (sign_of(buffer) == 0 ? 1u : 0u) << j;
      if (writes) error[i + j] = buffer - float_of(sign_of(buffer) ^ bits_of(scale));
    }
    signs[i / 8] = static_cast<uint8_t>(bits);
  }
}

void sign_pack(const void* value, Kind kind, float* error, uint8_t* signs, float scale, int64_t begin,
               int64_t end) {
  alignas(64) float tile[TILE];
  const bool writes = is_finite(scale);
  for (int64_t at = begin; at < end; at += TILE) {
    const int64_t count = least(TILE, end - at);
    pack_tile(widened(value, kind, at, count, tile), error + at, signs + at / 8, scale, writes, count);
  }
}

inline void add_signs(float* __restrict total, const uint8_t* signs, float scale, int64_t count) {
  const Words lanes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const Words sign = Words{} + 0x80000000u, magnitude = Words{} + bits_of(scale);
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    const Words bits = Words{} + (uint32_t{signs[i / 8]} | uint32_t{signs[i / 8 + 1]} << 8);
    const Words is_negative = reinterpret_cast<Words>((bits & lanes) == 0);
    Floats* const to = reinterpret_cast<Floats*>(total + i);
    *to = *to + reinterpret_cast<Floats>((is_negative & sign) ^ magnitude);
  }
  for (; i < count; ++i) {
    const bool is_negative = (signs[i / 8] >> (i % 8) & 1) == 0;
    total[i] = total[i] + (is_negative ? -scale : scale);
  }
}

inline void times(float* __restrict total, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) total[i] = total[i] * factor;
}

void sign_unpack(const uint8_t* signs, int64_t sign_stride, const float* scales, int64_t scale_stride,
                 int64_t parts, int64_t block, void* out, Kind kind, float factor, int64_t begin, int64_t end) {
  alignas(64) float total[TILE];
  for (int64_t at = begin; at < end; at += TILE) {
    const int64_t count = least(TILE, end - at);
    for (int64_t i = 0; i < count; ++i) total[i] = 0.0f;
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t i = 0; i < count; i += least(block, TILE)) {
        const float scale = scales[part * scale_stride + (at + i) / block];
        add_signs(total + i, signs + part * sign_stride + (at + i) / 8, scale, least(block, count - i));
      }
    }
    times(total, factor, count);
    narrowed(total, out, kind, at, count);
  }
}

// -- small integers ---------------------------------------------------------------------------------------

inline float largest_of(const float* buffer, int64_t count, bool& all_finite) {
  uint32_t largest = 0;  // magnitudes are ordered as integers, with inf and nan at the end
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t one = bits_of(buffer[i]) & 0x7fffffffu;
    largest = one > largest ? one : largest;
  }
  all_finite = largest < 0x7f800000u;
  return float_of(largest);
}

inline void integers_of(const float* __restrict from, int8_t* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(static_cast<int32_t>(from[i]));
}

// Two int4 are a byte, the earlier in the low half.
inline void join_pairs(const int8_t* __restrict from, uint8_t* __restrict to, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    to[i] = static_cast<uint8_t>((from[2 * i] & 15) | (from[2 * i + 1] & 15) << 4);
  }
}

// The opposite. (x ^ 8) - 8 extends the sign of 4 bits.
inline void split_pairs(const uint8_t* __restrict from, int8_t* __restrict to, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    to[2 * i] = static_cast<int8_t>(((from[i] & 15) ^ 8) - 8);
    to[2 * i + 1] = static_cast<int8_t>(((from[i] >> 4) ^ 8) - 8);
  }
}

float quantize(const void* flat, Kind kind, uint8_t* values, float* error, int bits, int64_t begin, int64_t end) {
  alignas(64) float tile[TILE], buffer[TILE], whole[TILE];
  const int64_t count = end - begin;
  const float* from = widened(flat, kind, begin, count, tile);
  if (error == nullptr) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  } else {
    for (int64_t i = 0; i < count; ++i) buffer[i] = from[i] + error[begin + i];
  }
  bool all_finite = true;
  float largest = largest_of(buffer, count, all_finite);
  const float levels = bits == 8 ? 127.0f : 7.0f;
  const float step = bits == 8 ? static_cast<float>(1.0 / 127.0) : static_cast<float>(1.0 / 7.0);
  if (all_finite && largest < SMALLEST) largest = 0.0f;
  const float inverse = all_finite && largest > 0.0f ? levels / largest : 0.0f;
  if (all_finite) {
    for (int64_t i = 0; i < count; ++i) whole[i] = buffer[i] * inverse + MAGIC - MAGIC;
  } else {
    for (int64_t i = 0; i < count; ++i) whole[i] = 0.0f;
  }
  if (bits == 8) {
    integers_of(whole, reinterpret_cast<int8_t*>(values) + begin, count);
  } else {
    alignas(64) int8_t small[TILE];
    if (count % 2) small[count] = 0;
    integers_of(whole, small, count);
    join_pairs(small, values + begin / 2, (count + 1) / 2);
  }
  if (error != nullptr && all_finite) {
    for (int64_t i = 0; i < count; ++i) error[begin + i] = buffer[i] - largest * (whole[i] * step);
  }
  return all_finite ? largest : float_of(0x7fc00000u);
}

inline void add_integers(float* __restrict total, const uint8_t* values, int bits, float magnitude, int64_t at,
                         int64_t count) {
  const float step = bits == 8 ? static_cast<float>(1.0 / 127.0) : static_cast<float>(1.0 / 7.0);
  alignas(64) int8_t small[TILE];
  const int8_t* from = reinterpret_cast<const int8_t*>(values) + at;
  if (bits == 4) {
    split_pairs(values + at / 2, small, (count + 1) / 2);
    from = small;
  }
  for (int64_t i = 0; i < count; ++i) {
    total[i] = total[i] + static_cast<float>(from[i]) * step * magnitude;
  }
}

void dequantize(const uint8_t* values, int64_t value_stride, const float* absmax, int64_t absmax_stride,
                int64_t parts, int64_t block, int bits, void* out, Kind kind, float factor, int64_t begin,
                int64_t end) {
  alignas(64) float total[TILE];
  for (int64_t at = begin; at < end; at += TILE) {
    const int64_t count = least(TILE, end - at);
    for (int64_t i = 0; i < count; ++i) total[i] = 0.0f;
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t i = 0; i < count; i += block) {
        const float magnitude = absmax[part * absmax_stride + (at + i) / block];
        const uint8_t* from = values + part * value_stride;
        add_integers(total + i, from, bits, magnitude, at + i, least(block, count - i));
      }
    }
    times(total, factor, count);
    narrowed(total, out, kind, at, count);
  }
}

}  // namespace

const BlockKernels block_kernels = {sum_sizes, sign_pack, sign_unpack, quantize, dequantize};

}  // namespace XDS_ISA
}  // namespace xds
