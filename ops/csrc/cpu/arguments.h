// The instruction set that is used, and checks of the arguments of ops, for all files that register CPU kernels.
//
// XDS_CPU_ISA (avx512, avx2 or baseline) selects an instruction set; else it is the widest that the processor and
// the system support.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <string>

#include "kernels.h"

namespace xds {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

inline Isa isa() {
  static const Isa widest = has_avx512() ? Isa::avx512 : has_avx2() ? Isa::avx2 : Isa::baseline;
  const char* asked = std::getenv("XDS_CPU_ISA");
  if (asked == nullptr || *asked == '\0') return widest;
  const std::string name = asked;
  if (name == "avx512" && has_avx512()) return Isa::avx512;
  if (name == "avx2" && has_avx2()) return Isa::avx2;
  STD_TORCH_CHECK(name == "baseline", "XDS_CPU_ISA = \"", asked,
                  "\": this processor runs baseline and, if it has them, avx2 and avx512; unset it");
  return Isa::baseline;
}

// The kernels of that instruction set, of a kind that every instruction set has.
template <class Kernels>
const Kernels& of_isa(const Kernels& baseline, const Kernels& avx2, const Kernels& avx512) {
  const Isa found = isa();
  return found == Isa::avx512 ? avx512 : found == Isa::avx2 ? avx2 : baseline;
}

inline Kind kind_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Kind::fp32;
    case ScalarType::BFloat16:
      return Kind::bf16;
    case ScalarType::Half:
      return Kind::fp16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

inline void check_flat(const Tensor& tensor, const char* name, int64_t numel) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(tensor.numel() == numel, name, " has ", tensor.numel(), " elements, and not ", numel);
}

inline void* stream(const Tensor& tensor, const char* name, int64_t numel, Kind* kind) {
  check_flat(tensor, name, numel);
  *kind = kind_of(tensor, name);
  return tensor.data_ptr();
}

inline float* wide(const Tensor& tensor, const char* name, int64_t numel) {
  Kind kind;
  void* data = stream(tensor, name, numel, &kind);
  STD_TORCH_CHECK(kind == Kind::fp32, name, " must be float32");
  return static_cast<float*>(data);
}

}  // namespace xds
