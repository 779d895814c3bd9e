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

#include "isa.h"
#include "kernels.h"

namespace xds {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As `selected`, where XDS_CPU_ISA names an instruction set that this processor runs.
inline Isa isa() {
  bool is_known = true;
  const Isa found = selected(&is_known);
  STD_TORCH_CHECK(is_known, "XDS_CPU_ISA = \"", std::getenv("XDS_CPU_ISA"),
                  "\": this processor runs baseline and, if it has them, avx2 and avx512; unset it");
  return found;
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
