// The interface of the sums, equal for every instruction set: sums.cpp is compiled once for each.
#pragma once

#include <cstdint>

namespace xds {

enum class Dtype : int { fp32, bf16, fp16, fp64 };

inline int64_t bytes_of(Dtype kind) { return kind == Dtype::fp64 ? 8 : kind == Dtype::fp32 ? 4 : 2; }

// out[begin, end) = parts[0] + parts[1] + ..., in this order; with `add`, out += that sum.
struct Sum {
  void* out;
  Dtype out_kind;
  const void* const* parts;
  int num_parts;
  Dtype part_kind;
  bool add;
  bool streams;  // `out` is too large to stay in a cache: it is written without being read first
};

struct Sums {
  void (*run)(const Sum&, int64_t begin, int64_t end);
};

inline bool can_sum(Dtype part, Dtype out) {
  return part == out || (out == Dtype::fp32 && (part == Dtype::bf16 || part == Dtype::fp16));
}

namespace baseline {
extern const Sums sums;
}
namespace avx2 {
extern const Sums sums;
}
namespace avx512 {
extern const Sums sums;
}

}  // namespace xds
