// square_sum on CUDA: see ops/kernels/decide.py. Two launches: sums of stretches, then their sum.
#include "rows.cuh"

namespace xds {

constexpr int64_t kMostSums = 16384;  // so that the second launch takes microseconds

// Sum `at` is over the stretch [at * stretch, (at + 1) * stretch), which is whole rows.
template <class T>
__global__ void __launch_bounds__(kThreads, 4) square_sums(
    const T* flat, int64_t numel, int64_t stretch, bool packed, double* sums) {
  constexpr int kTogether = 16 / sizeof(T);  // packs: 64 bytes per thread in flight
  for (int64_t at = blockIdx.x; at * stretch < numel; at += gridDim.x) {
    const int64_t start = at * stretch, stop = least(start + stretch, numel);
    double sum = 0.0;
    for (int64_t base = start; base < stop; base += 4 * kThreads * kTogether) {
      Pack<T, 4> packs[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        packs[u] = load_four(flat, base + 4 * (u * kThreads + threadIdx.x), stop, packed);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += wide(packs[u].at[i]) * wide(packs[u].at[i]);
      }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[at] = sum;
  }
}

// One block.
__global__ void __launch_bounds__(kThreads) add_sums(const double* sums, int64_t count, double* total) {
  double sum = 0.0;
#pragma unroll 8
  for (int64_t at = threadIdx.x; at < count; at += kThreads) sum += sums[at];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total = sum;
}

template <class T>
void launch_sums(const Place& place, const Tensor& flat, int64_t stretch, double* sums) {
  const int64_t numel = flat.numel();
  place.launch_over<&square_sums<T>>(
      divide_up(numel, stretch), static_cast<const T*>(flat.const_data_ptr()), numel, stretch,
      takes_packs(flat, 0, sizeof(T)), sums);
}

Tensor square_sum(Tensor flat) {
  const Checks check("square_sum", "flat", flat);
  check.flat(flat, "flat", {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double});
  const int64_t numel = flat.numel();
  const int64_t stretch = std::max<int64_t>(divide_up(numel, kRow * kMostSums), 1) * kRow;
  const int64_t count = divide_up(numel, stretch);
  Tensor total = torch::stable::new_empty(flat, {}, ScalarType::Double);
  Tensor partial = torch::stable::new_empty(flat, {count}, ScalarType::Double);
  auto* sums = static_cast<double*>(partial.mutable_data_ptr());
  const Place place(flat);
  if (numel > 0 && flat.scalar_type() == ScalarType::Double) {
    launch_sums<double>(place, flat, stretch, sums);
  } else if (numel > 0) {
    with_float_type(flat.scalar_type(), [&](auto tag) {
      launch_sums<typename decltype(tag)::type>(place, flat, stretch, sums);
    });
  }
  place.launch(&add_sums, 1, sums, count, static_cast<double*>(total.mutable_data_ptr()));
  return total;
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) { m.impl("square_sum", TORCH_BOX(&xds::square_sum)); }
