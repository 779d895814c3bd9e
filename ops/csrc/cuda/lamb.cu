// lamb_direction_ and lamb_apply_ on CUDA: see ops/kernels/lamb.py for the definition.
//
//   rows of 8,192:  |   row 0   |   row 1   |   row 2   |        one block per row: direction, and its sums
//   parts:          |-A-|--B--|----- C ----------|-- D ----
//   sums kept:       A   B  tail    head       head tail         C = tail of 0 + head of 1 + head of 2
//
// A part inside one row is summed there. Of a longer part each row keeps its share: as `head` where the part
// begins in an earlier row or with this row, else as `tail`. A second launch adds the shares in order. So the
// sums depend on the bounds only, and neither many small parts nor one of 1e9 elements leaves the device idle.
// The host reads no bound.
#include "rows.cuh"

#include "formulas.h"

namespace xds {

struct Sums {
  double param, direction;
};

struct Shares {  // of one row
  Sums head, tail;
};

// The last part that begins at or before `at`; -1 before all parts, `parts` after all of them. It is never an
// empty part, except for one at the very start or end.
__device__ inline int64_t part_at(const int64_t* bounds, int64_t parts, int64_t at) {
  int64_t low = 0, high = parts + 1;  // the first bound beyond `at`
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (bounds[middle] <= at) low = middle + 1; else high = middle;
  }
  return low - 1;
}

struct Lamb {
  const float* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  float* direction;
  Sums* square_norms;
  Shares* shares;
  const int64_t* bounds;
  const float *step, *scale, *found_inf;
  int64_t numel, parts;
  float weight_decay;
  bool packed;
  Moments moments;

  explicit Lamb(const Moments& moments) : moments(moments) {}
};

__device__ inline void add_square(Sums& sums, float param, float direction) {
  sums.param += wide(param) * wide(param);
  sums.direction += wide(direction) * wide(direction);
}

// Directions and moments of [start, stop), and this thread's sums over it.
template <class Grad, class State>
__device__ inline Sums directions(
    const Lamb& on, const Moments::Step& step, float scale, int64_t start, int64_t stop) {
  constexpr int kTogether = 2;  // packs in flight
  Sums sums = {0.0, 0.0};
#pragma unroll 1
  for (int q = 0; q < kQuads; q += kTogether) {
    Pack<float, 4> param[kTogether], direction[kTogether];
    Pack<Grad, 4> grad[kTogether];
    Pack<State, 4> mean[kTogether], square[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t at = start + 4 * ((q + u) * kThreads + threadIdx.x);
      param[u] = load_four(on.param, at, stop, on.packed);
      grad[u] = load_four(static_cast<const Grad*>(on.grad), at, stop, on.packed);
      mean[u] = load_four(static_cast<const State*>(on.exp_avg), at, stop, on.packed);
      square[u] = load_four(static_cast<const State*>(on.exp_avg_sq), at, stop, on.packed);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t at = start + 4 * ((q + u) * kThreads + threadIdx.x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float state[2] = {static_cast<float>(mean[u].at[i]), static_cast<float>(square[u].at[i])};
        const float unscaled = static_cast<float>(grad[u].at[i]) * scale;
        const float moment = on.moments(step, unscaled, state);
        direction[u].at[i] = moment + on.weight_decay * param[u].at[i];
        mean[u].at[i] = static_cast<State>(state[0]);
        square[u].at[i] = static_cast<State>(state[1]);
        // not after the end: with eps 0 it would be 0/0 there
        if (at + i < stop) add_square(sums, param[u].at[i], direction[u].at[i]);
      }
      store_four(static_cast<State*>(on.exp_avg), at, stop, on.packed, mean[u]);
      store_four(static_cast<State*>(on.exp_avg_sq), at, stop, on.packed, square[u]);
      store_four(on.direction, at, stop, on.packed, direction[u]);
    }
  }
  return sums;
}

__device__ inline void keep(const Lamb& on, int64_t row, int64_t part, const Sums& sums) {
  const int64_t start = row * kRow, first = on.bounds[part], last = on.bounds[part + 1];
  if (first >= start && last <= start + kRow) {
    on.square_norms[part] = sums;
  } else if (first <= start) {
    on.shares[row].head = sums;
  } else {
    on.shares[row].tail = sums;
  }
}

// The sums of a row's parts, read from the cache. Where they are few and long, the block sums one after another;
// else one warp sums each.
__device__ inline void cut_row(const Lamb& on, int64_t row, int64_t stop, int64_t first, int64_t last) {
  const int64_t start = row * kRow;
  const bool few = last - first < 8;
  const int width = few ? kThreads : 32;
  const int lane = threadIdx.x % width;
  __syncthreads();  // all threads can now read the directions
  for (int64_t part = first + threadIdx.x / width; part <= last; part += kThreads / width) {
    const int64_t from = most(on.bounds[part], start), to = least(on.bounds[part + 1], stop);
    Sums sums = {0.0, 0.0};
#pragma unroll 4
    for (int64_t at = from + lane; at < to; at += width) add_square(sums, on.param[at], on.direction[at]);
    if (few) {
      sums = {block_sum(sums.param), block_sum(sums.direction)};
    } else {
      for (int other = 16; other > 0; other /= 2) {
        sums.param += __shfl_xor_sync(~0u, sums.param, other);
        sums.direction += __shfl_xor_sync(~0u, sums.direction, other);
      }
    }
    if (lane == 0) keep(on, row, part, sums);
  }
}

template <class Grad, class State>
__global__ void __launch_bounds__(kThreads, 3) lamb_rows(Lamb on) {
  if (skips(on.found_inf)) return;
  __shared__ Moments::Step shared_step;
  if (threadIdx.x == 0) shared_step = on.moments.at(*on.step);
  __syncthreads();
  const Moments::Step step = shared_step;
  const float scale = number_or(on.scale, 1.0f);
  for (int64_t row = blockIdx.x; row * kRow < on.numel; row += gridDim.x) {
    const int64_t start = row * kRow, stop = least(start + kRow, on.numel);
    const Sums sums = directions<Grad, State>(on, step, scale, start, stop);
    const int64_t first = part_at(on.bounds, on.parts, start);
    const bool is_whole = first >= 0 && first < on.parts && stop <= on.bounds[first + 1];
    if (is_whole) {
      const Sums whole = {block_sum(sums.param), block_sum(sums.direction)};
      if (threadIdx.x == 0) keep(on, row, first, whole);
    } else {
      const int64_t last = part_at(on.bounds, on.parts, stop - 1);
      cut_row(on, row, stop, most(first, 0), least(last, on.parts - 1));
    }
  }
}

// The parts that are not inside one row: longer parts, and empty ones.
__global__ void __launch_bounds__(kThreads) lamb_parts(Lamb on) {
  if (skips(on.found_inf)) return;
  for (int64_t part = blockIdx.x; part < on.parts; part += gridDim.x) {
    const int64_t from = on.bounds[part], to = on.bounds[part + 1];
    const int64_t first = from / kRow, last = (to - 1) / kRow;
    if (from < to && from >= 0 && first == last) continue;
    Sums sums = {0.0, 0.0};
    if (from < to) {
#pragma unroll 4
      for (int64_t row = first + threadIdx.x; row <= last; row += kThreads) {
        const Shares& shares = on.shares[row];
        const Sums share = row * kRow < from ? shares.tail : shares.head;
        sums.param += share.param;
        sums.direction += share.direction;
      }
    }
    sums = {block_sum(sums.param), block_sum(sums.direction)};
    if (threadIdx.x == 0) on.square_norms[part] = sums;
  }
}

void lamb_direction_(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor direction, Tensor square_norms,
    Tensor bounds, Tensor step, MaybeTensor scale, MaybeTensor found_inf, double beta1, double beta2,
    double eps, double weight_decay, bool bias_correction) {
  const Checks check("lamb_direction_", "param", param);
  check.flat(param, "param", kFloat);
  check.flat(grad, "grad", kFloats);
  check.flat(exp_avg, "exp_avg", kStateTypes);
  check.flat(exp_avg_sq, "exp_avg_sq", {exp_avg.scalar_type()});
  check.flat(direction, "direction", kFloat);
  check.on_device(bounds, "bounds", {ScalarType::Long});
  check.on_device(square_norms, "square_norms", {ScalarType::Double});
  check.that(bounds.numel() >= 1, "bounds is empty; it needs to have one more than there are parts");
  const int64_t numel = param.numel(), parts = bounds.numel() - 1, rows = divide_up(numel, kRow);
  check.that(square_norms.numel() == 2 * parts, "square_norms needs two sums for each part");
  Tensor shares = torch::stable::new_empty(param, {4 * rows}, ScalarType::Double);
  Lamb on(Moments(beta1, beta2, eps, bias_correction));
  on.param = static_cast<const float*>(param.const_data_ptr());
  on.grad = grad.const_data_ptr();
  on.exp_avg = exp_avg.mutable_data_ptr();
  on.exp_avg_sq = exp_avg_sq.mutable_data_ptr();
  on.direction = static_cast<float*>(direction.mutable_data_ptr());
  on.square_norms = static_cast<Sums*>(square_norms.mutable_data_ptr());
  on.shares = static_cast<Shares*>(shares.mutable_data_ptr());
  on.bounds = static_cast<const int64_t*>(bounds.const_data_ptr());
  on.step = check.number(step, "step");
  on.scale = check.number(scale, "scale");
  on.found_inf = check.number(found_inf, "found_inf");
  on.numel = numel;
  on.parts = parts;
  on.weight_decay = static_cast<float>(weight_decay);
  on.packed = fit_packs({&param, &grad, &exp_avg, &exp_avg_sq, &direction});

  const Place place(param);
  if (numel > 0) {
    with_float_type(grad.scalar_type(), [&](auto grad_tag) {
      with_state_type(exp_avg.scalar_type(), [&](auto state_tag) {
        using Grad = typename decltype(grad_tag)::type;
        using State = typename decltype(state_tag)::type;
        place.launch_over<&lamb_rows<Grad, State>>(rows, on);
      });
    });
  }
  if (parts > 0) place.launch_over<&lamb_parts>(parts, on);
}

// The rate of each part. Search starts at the part `first`; elements outside of all parts are not changed.
struct Rates {
  const int64_t* bounds;
  const float* rates;
  int64_t parts;
};

__device__ inline void apply_four(
    const Rates& on, int64_t first, int64_t at, const Pack<float, 4>& direction, Pack<float, 4>& param) {
  int64_t part = first;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    while (part < on.parts && on.bounds[part + 1] <= at + i) ++part;
    if (part >= 0 && part < on.parts) param.at[i] -= on.rates[part] * direction.at[i];
  }
}

__global__ void __launch_bounds__(kThreads, 4) lamb_apply_rows(
    Rates on, float* param, const float* direction, Out out, const float* found_inf, int64_t numel,
    bool packed) {
  if (skips(found_inf)) return;
  constexpr int kTogether = 4;
  for (int64_t row = blockIdx.x; row * kRow < numel; row += gridDim.x) {
    const int64_t start = row * kRow, stop = least(start + kRow, numel);
    const int64_t first = part_at(on.bounds, on.parts, start);
    const bool is_whole = first >= 0 && first < on.parts && stop <= on.bounds[first + 1];
    const float rate = is_whole ? on.rates[first] : 0.0f;
#pragma unroll 1
    for (int q = 0; q < kQuads; q += kTogether) {
      Pack<float, 4> values[kTogether], directions[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int64_t at = start + 4 * ((q + u) * kThreads + threadIdx.x);
        values[u] = load_four(param, at, stop, packed);
        directions[u] = load_four(direction, at, stop, packed);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int64_t at = start + 4 * ((q + u) * kThreads + threadIdx.x);
        if (at >= stop) break;
        if (is_whole) {
#pragma unroll
          for (int i = 0; i < 4; ++i) values[u].at[i] -= rate * directions[u].at[i];
        } else {
          apply_four(on, part_at(on.bounds, on.parts, at), at, directions[u], values[u]);
        }
        store_four(param, at, stop, packed, values[u]);
        store_out_four(out, at, stop, packed, values[u]);
      }
    }
  }
}

void lamb_apply_(
    Tensor param, Tensor direction, MaybeTensor out, Tensor bounds, Tensor rates, MaybeTensor found_inf) {
  const Checks check("lamb_apply_", "param", param);
  check.flat(param, "param", kFloat);
  check.flat(direction, "direction", kFloat);
  check.flat(out, "out", kFloats);
  check.on_device(bounds, "bounds", {ScalarType::Long});
  check.on_device(rates, "rates", {ScalarType::Float});
  check.that(bounds.numel() == rates.numel() + 1, "bounds needs to have one more element than rates");
  const float* stop_flag = check.number(found_inf, "found_inf");
  const int64_t numel = param.numel();
  if (numel == 0) return;
  bool packed = fit_packs({&param, &direction});
  if (out.has_value()) packed = packed && fit_packs({&*out});
  const Rates on = {
      static_cast<const int64_t*>(bounds.const_data_ptr()),
      static_cast<const float*>(rates.const_data_ptr()), rates.numel()};
  const Place place(param);
  place.launch_over<&lamb_apply_rows>(
      divide_up(numel, kRow), on,
      static_cast<float*>(param.mutable_data_ptr()), static_cast<const float*>(direction.const_data_ptr()),
      out_of(out), stop_flag, numel, packed);
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) {
  m.impl("lamb_direction_", TORCH_BOX(&xds::lamb_direction_));
  m.impl("lamb_apply_", TORCH_BOX(&xds::lamb_apply_));
}
