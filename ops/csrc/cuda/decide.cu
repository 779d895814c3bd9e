// decide on CUDA: see ops/kernels/decide.py. One thread: the table has four numbers for each rank.
#include <cfloat>

#include "common.cuh"

namespace xds {

// No contraction to fused multiply-adds: the host computes the same numbers from the same table.
__global__ void decide_one(
    const double* table, int64_t ranks, double least_square, double factor, double limit, float* out) {
  if (threadIdx.x != 0) return;
  double square = 0.0, total = 0.0;
  bool says = false, has_weights = false, has_none = false;
  for (int64_t rank = 0; rank < ranks; ++rank, table += 4) {
    square = __dadd_rn(square, table[0]);
    says = says || table[1] != 0.0;
    total = __dadd_rn(total, table[2]);
    has_weights = has_weights || table[2] > 0.0;
    has_none = has_none || table[2] < 0.0;
  }
  const double mean = total > 0.0 ? factor / total : factor;
  const double norm = __dmul_rn(sqrt(square), mean);
  const double clip = limit != 0.0 && norm > limit ? limit / __dadd_rn(norm, 1e-6) : 1.0;
  const double scale = __dmul_rn(mean, clip);
  const bool is_mixed = has_weights && has_none;
  const bool plain = square > least_square && square <= DBL_MAX && !says && !is_mixed;
  out[0] = static_cast<float>(scale);
  out[1] = static_cast<float>(1.0 / scale);
  out[2] = plain ? 0.0f : 1.0f;
  out[3] = plain ? 1.0f : 0.0f;
}

Tensor decide(Tensor table, double least_square, double factor, double limit) {
  const Checks check("decide", "table", table);
  check.on_device(table, "table", {ScalarType::Double});
  check.that(table.dim() == 2 && table.size(1) == 4 && table.size(0) > 0, "table needs the shape [ranks, 4]");
  Tensor out = torch::stable::new_empty(table, {4}, ScalarType::Float);
  Place(table).launch(
      &decide_one, 1, static_cast<const double*>(table.const_data_ptr()), table.size(0), least_square, factor,
      limit, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) { m.impl("decide", TORCH_BOX(&xds::decide)); }
