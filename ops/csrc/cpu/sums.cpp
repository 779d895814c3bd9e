// Sums in rank order for one instruction set, XDS_ISA: the bits of `sum_in_order` in ops/flat.py.
//
// Every addition is rounded to the dtype of `out`. The standard library is not used; see kernels.cpp.
#include "sums.h"

#include "narrow.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace xds {
namespace XDS_ISA {
namespace {

constexpr int64_t GROUP = 256;  // elements that stay in the L1 cache while the parts are added

struct Fp32 {
  using Stored = float;
  using Wide = float;
  static float widen(float x) { return x; }
  static float narrow(float x) { return x; }
};
struct Fp64 {
  using Stored = double;
  using Wide = double;
  static double widen(double x) { return x; }
  static double narrow(double x) { return x; }
};
struct Bf16 {
  using Stored = uint16_t;
  using Wide = float;
  static float widen(uint16_t x) { return from_bf16(x); }
  static uint16_t narrow(float x) { return to_bf16(x); }
};
struct Fp16 {
  using Stored = uint16_t;
  using Wide = float;
  static float widen(uint16_t x) { return from_fp16(x); }
  static uint16_t narrow(float x) { return to_fp16(x); }
};

// x, rounded to the dtype of `out`
template <class Out>
inline typename Out::Wide rounded(typename Out::Wide x) {
  return Out::widen(Out::narrow(x));
}

template <class Part, class Out>
void two(const Sum& sum, int64_t begin, int64_t end) {
  const auto* a = static_cast<const typename Part::Stored*>(sum.parts[0]);
  const auto* b = static_cast<const typename Part::Stored*>(sum.parts[1]);
  auto* out = static_cast<typename Out::Stored*>(sum.out);
  if (sum.add) {
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      out[i] = Out::narrow(Out::widen(out[i]) + rounded<Out>(Part::widen(a[i]) + Part::widen(b[i])));
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) out[i] = Out::narrow(Part::widen(a[i]) + Part::widen(b[i]));
  }
}

template <class Part, class Out>
void any(const Sum& sum, int64_t begin, int64_t end) {
  typename Out::Wide total[GROUP];
  auto* out = static_cast<typename Out::Stored*>(sum.out);
  for (int64_t at = begin; at < end; at += GROUP) {
    const int64_t count = end - at < GROUP ? end - at : GROUP;
    for (int r = 0; r < sum.num_parts; ++r) {
      const auto* part = static_cast<const typename Part::Stored*>(sum.parts[r]) + at;
      if (r == 0) {
        for (int64_t i = 0; i < count; ++i) total[i] = Part::widen(part[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) total[i] = rounded<Out>(total[i] + Part::widen(part[i]));
      }
    }
    if (sum.add) {
      for (int64_t i = 0; i < count; ++i) out[at + i] = Out::narrow(Out::widen(out[at + i]) + total[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[at + i] = Out::narrow(total[i]);
    }
  }
}

#if defined(__x86_64__)
// A line at a time, past the caches. Wider registers are slower here.
void streamed(const Sum& sum, int64_t begin, int64_t end) {
  const auto* a = static_cast<const float*>(sum.parts[0]);
  const auto* b = static_cast<const float*>(sum.parts[1]);
  auto* out = static_cast<float*>(sum.out);
  for (; begin < end && reinterpret_cast<uintptr_t>(out + begin) % 64 != 0; ++begin) out[begin] = a[begin] + b[begin];
  for (; begin + 16 <= end; begin += 16) {
    for (int64_t i = begin; i < begin + 16; i += 4) {
      _mm_stream_ps(out + i, _mm_add_ps(_mm_loadu_ps(a + i), _mm_loadu_ps(b + i)));
    }
  }
  for (; begin < end; ++begin) out[begin] = a[begin] + b[begin];
  _mm_sfence();
}
#else
void streamed(const Sum& sum, int64_t begin, int64_t end) { two<Fp32, Fp32>(sum, begin, end); }
#endif

template <class Part, class Out>
void of(const Sum& sum, int64_t begin, int64_t end) {
  sum.num_parts == 2 ? two<Part, Out>(sum, begin, end) : any<Part, Out>(sum, begin, end);
}

void run(const Sum& sum, int64_t begin, int64_t end) {
  if (sum.part_kind == Dtype::fp64) return of<Fp64, Fp64>(sum, begin, end);
  if (sum.streams && sum.part_kind == Dtype::fp32 && sum.num_parts == 2 && !sum.add) return streamed(sum, begin, end);
  if (sum.part_kind == Dtype::fp32) return of<Fp32, Fp32>(sum, begin, end);
  const bool widens = sum.out_kind == Dtype::fp32;
  if (sum.part_kind == Dtype::bf16) return widens ? of<Bf16, Fp32>(sum, begin, end) : of<Bf16, Bf16>(sum, begin, end);
  return widens ? of<Fp16, Fp32>(sum, begin, end) : of<Fp16, Fp16>(sum, begin, end);
}

}  // namespace

extern const Sums sums = {run};

}  // namespace XDS_ISA
}  // namespace xds
