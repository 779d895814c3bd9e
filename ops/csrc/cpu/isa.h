// The instruction set that is used: the one that XDS_CPU_ISA (avx512, avx2 or baseline) names, else the widest that the
// processor and the system support.
#pragma once

#include <cstdlib>
#include <string>

namespace xds {

enum class Isa { baseline, avx2, avx512 };

#if defined(__x86_64__)
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
inline bool has_avx2() { return __builtin_cpu_supports("avx2"); }
#else
inline bool has_avx512() { return false; }
inline bool has_avx2() { return false; }
#endif

// is_known: XDS_CPU_ISA is empty, or names an instruction set that this processor runs.
inline Isa selected(bool* is_known) {
  static const Isa widest = has_avx512() ? Isa::avx512 : has_avx2() ? Isa::avx2 : Isa::baseline;
  const char* asked = std::getenv("XDS_CPU_ISA");
  const std::string name = asked == nullptr ? "" : asked;
  *is_known = true;
  if (name == "avx512" && has_avx512()) return Isa::avx512;
  if (name == "avx2" && has_avx2()) return Isa::avx2;
  if (name == "baseline") return Isa::baseline;
  *is_known = name.empty();
  return widest;
}

}  // namespace xds
