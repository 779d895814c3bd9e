// One pass of an element-wise rule over a flat shard: unscale, update, cast; every byte is moved once.
//
// One launch for any length. The grid has as many blocks as run at once and strides over the shard, so that a
// block computes the values for its step (two pow in double) once. A thread has 8 elements of every tensor in
// flight, as two packs of four, one warp apart: for fp32 Adam 128 bytes, in 58 registers. So 1,024 threads of a
// multiprocessor keep 128 KiB in flight, where an H200 (4.3 TB/s, some 700 ns) needs about 24. No cache hints:
// nothing is read twice, gradients are often still in L2, and `out` is read next.
#pragma once

#include "common.cuh"
#include "formulas.h"
#include "rounding.cuh"

namespace xds {

// The division of [0, numel): `packs` packs of four begin at `head`; `edges` single elements are before and after
// them. Where the alignments of the tensors differ, all elements are single.
struct Cut {
  int64_t head, packs, edges;
};

template <int kStates>
struct Operands {
  void* param;
  unsigned short* low;  // the lower halves, if `param` has the upper ones
  const void* grad;
  void* states[kStates > 0 ? kStates : 1];
  Out out;
  bool takes_edits;  // `out` is `param` rounded, except where a script wrote a new value
  Draws draws;  // for a `param` of 16 bits, and the last state if it is bf16
  const float* step;
  const float* scale;
  const float* found_inf;
  Cut cut;
};

template <int kWide, int kUnroll, class Param, class Grad, class State, class Rule, class Where>
__device__ inline void sweep(
    const Operands<Rule::kStates>& on, const Rule& rule, const typename Rule::Step& step, float scale,
    int64_t units, Where where) {
  constexpr bool kSplit = std::is_same_v<Param, Upper>;
  constexpr bool kDraws = (sizeof(Param) == 2 && !kSplit) || (sizeof(State) == 2 && Rule::kStates > 0);
  Drawer drawer(on.draws, kDraws ? number_or(on.step, 1.0f) : 0.0f);
  Param* const params = static_cast<Param*>(on.param);
  constexpr int kStates = Rule::kStates;
  const int64_t stride = int64_t(gridDim.x) * kThreads * kUnroll;
  const int64_t first = int64_t(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  for (int64_t base = first; base < units; base += stride) {
    Pack<Param, kWide> param[kUnroll];
    Pack<Grad, kWide> grad[kUnroll];
    Pack<State, kWide> states[kUnroll][kStates > 0 ? kStates : 1];
    Pack<unsigned short, kWide> written[kUnroll];
    Pack<unsigned short, kWide> low[kSplit ? kUnroll : 1];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {  // all loads first
      const int64_t unit = base + u * kThreads;
      if (unit >= units) break;
      const int64_t at = where(unit);
      param[u] = load<kWide>(params + at);
      if constexpr (kSplit) low[u] = load<kWide>(on.low + at);
      grad[u] = load<kWide>(static_cast<const Grad*>(on.grad) + at);
#pragma unroll
      for (int s = 0; s < kStates; ++s)
        states[u][s] = load<kWide>(static_cast<const State*>(on.states[s]) + at);
      if (!kSplit && on.takes_edits) written[u] = load<kWide>(static_cast<const unsigned short*>(on.out.data) + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t unit = base + u * kThreads;
      if (unit >= units) break;
      const int64_t at = where(unit);
      Pack<float, kWide> wide;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        if constexpr (kSplit) {
          wide.at[i] = param[u].at[i].joined(low[u].at[i]);
        } else {
          wide.at[i] = static_cast<float>(param[u].at[i]);
        }
      }
      if (!kSplit && on.takes_edits) take_edits<kWide>(on.out, written[u], wide);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        float state[kStates > 0 ? kStates : 1];
#pragma unroll
        for (int s = 0; s < kStates; ++s) state[s] = static_cast<float>(states[u][s].at[i]);
        const float unscaled = static_cast<float>(grad[u].at[i]) * scale;
        wide.at[i] = rule(step, unscaled, wide.at[i], state);
        const bool draws = kDraws && drawer.is_on();
        const uint32_t draw = draws ? drawer.at(at + i) : 0;
        if constexpr (kSplit) low[u].at[i] = lower_half(wide.at[i]);
        param[u].at[i] = draws ? rounded_by<Param>(wide.at[i], draw) : static_cast<Param>(wide.at[i]);
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          states[u][s].at[i] =
              draws && s == kStates - 1 ? rounded_by<State>(state[s], draw) : static_cast<State>(state[s]);
        }
      }
      store<kWide>(params + at, param[u]);
      if constexpr (kSplit) store<kWide>(on.low + at, low[u]);
#pragma unroll
      for (int s = 0; s < kStates; ++s) store<kWide>(static_cast<State*>(on.states[s]) + at, states[u][s]);
      if constexpr (!kSplit) store_out<kWide>(on.out, at, wide);
    }
  }
}

template <class Rule, class Param, class Grad, class State>
__global__ void __launch_bounds__(kThreads, 4) one_pass(Operands<Rule::kStates> on, Rule rule) {
  if (skips(on.found_inf)) return;
  __shared__ typename Rule::Step shared_step;
  if (threadIdx.x == 0) shared_step = rule.at(number_or(on.step, 1.0f));
  __syncthreads();
  const typename Rule::Step step = shared_step;
  const float scale = number_or(on.scale, 1.0f);
  const Cut cut = on.cut;
  sweep<4, 2, Param, Grad, State>(
      on, rule, step, scale, cut.packs, [cut](int64_t unit) { return cut.head + 4 * unit; });
  sweep<1, 4, Param, Grad, State>(on, rule, step, scale, cut.edges, [cut](int64_t unit) {
    return unit < cut.head ? unit : unit + 4 * cut.packs;
  });
}

inline Cut cut_of(int64_t numel, std::initializer_list<const MaybeTensor*> tensors) {
  for (int64_t head = 0; head < std::min<int64_t>(numel, 4); ++head) {
    const bool fits = std::all_of(tensors.begin(), tensors.end(), [head](const MaybeTensor* tensor) {
      return !tensor->has_value() || takes_packs(**tensor, head, item_bytes((*tensor)->scalar_type()));
    });
    if (!fits) continue;
    const int64_t packs = (numel - head) / 4;
    return {head, packs, numel - 4 * packs};
  }
  return {numel, 0, numel};
}

// Values before the step in memory of their own: the CPU's kernels alone read them.
inline void refuse_old(
    const char* op, const Tensor& param, std::initializer_list<const MaybeTensor*> olds) {
  for (const MaybeTensor* old : olds) {
    Checks(op, "param", param).that(!old->has_value(), "old values in other memory are read on a CPU only");
  }
}

// Master weights of fp32 alone, or of 16 bits as well.
struct WideParams {
  static constexpr std::initializer_list<ScalarType> types = kFloat;

  template <class Body>
  static void with(ScalarType, Body&& body) {
    body(Type<float>{});
  }
};

struct AnyParams {
  static constexpr std::initializer_list<ScalarType> types = kFloats;

  template <class Body>
  static void with(ScalarType type, Body&& body) {
    with_float_type(type, body);
  }
};

// Upper halves of fp32 master weights.
struct SplitParams {
  static constexpr std::initializer_list<ScalarType> types = {ScalarType::BFloat16};

  template <class Body>
  static void with(ScalarType, Body&& body) {
    body(Type<Upper>{});
  }
};

// low: the lower halves of master weights. rounds_away: `out` is rounded as upper halves are.
struct __attribute__((visibility("hidden"))) Division {
  MaybeTensor low;
  bool rounds_away = false;
};

// What is checked of every tensor but the states, which are left out.
template <class Params, class Rule>
Operands<Rule::kStates> operands_of(
    const Checks& check, const Tensor& param, const Tensor& grad, const MaybeTensor& out,
    const MaybeTensor& step, const MaybeTensor& scale, const MaybeTensor& found_inf, bool takes_edits,
    const MaybeTensor& draws, const Division& division) {
  check.flat(param, "param", Params::types);
  check.flat(grad, "grad", kFloats);
  check.flat(out, "out", kFloats);
  Operands<Rule::kStates> on = {};
  on.param = param.mutable_data_ptr();
  on.grad = grad.const_data_ptr();
  on.out = out_of(out);
  if (division.rounds_away && on.out.type == Out::kBFloat16) on.out.type = Out::kUpper;
  check.flat(division.low, "low", {ScalarType::Short});
  check.that(!(division.low.has_value() && out.has_value()), "low needs no out, which is param");
  if (division.low.has_value()) on.low = static_cast<unsigned short*>(division.low->mutable_data_ptr());
  check.that(
      !takes_edits || (on.out.type != Out::kNone && on.out.type != Out::kFloat),
      "takes_edits needs an out that is bfloat16 or float16");
  on.takes_edits = takes_edits;
  on.step = check.number(step, "step");
  on.scale = check.number(scale, "scale");
  on.found_inf = check.number(found_inf, "found_inf");
  if (draws.has_value()) {
    check.on_device(*draws, "draws", {ScalarType::Long});
    check.that(
        draws->numel() >= 3 && draws->numel() % 3 == 0, "draws needs to be [k, 3], with k at least 1");
    on.draws = {static_cast<const int64_t*>(draws->const_data_ptr()), draws->numel() / 3};
  }
  return on;
}

// Check, divide and launch. `states` are those of the rule: all are given, or all are None. Params: what `param` may be.
template <class Params, class Rule>
void launch_one_pass(
    const char* op, const Rule& rule, const Tensor& param, const Tensor& grad,
    const MaybeTensor (&states)[2], const char* const (&state_names)[2], const MaybeTensor& out,
    const MaybeTensor& step, const MaybeTensor& scale, const MaybeTensor& found_inf, bool takes_edits,
    const MaybeTensor& draws = {}, const Division& division = {}) {
  const Checks check(op, "param", param);
  Operands<Rule::kStates> on = operands_of<Params, Rule>(
      check, param, grad, out, step, scale, found_inf, takes_edits, draws, division);
  ScalarType state_type = ScalarType::Float;
  for (int s = 0; s < Rule::kStates; ++s) {
    check.flat(states[s], state_names[s], kStateTypes);
    if (s == 0) state_type = states[s]->scalar_type();
    check.that(states[s]->scalar_type() == state_type, "the states need one dtype, all fp32 or all bf16");
    on.states[s] = states[s]->mutable_data_ptr();
  }
  if (param.numel() == 0) return;
  const MaybeTensor all[] = {param, grad};
  on.cut = cut_of(param.numel(), {&all[0], &all[1], &states[0], &states[1], &out, &division.low});

  const Place place(param);
  const int64_t work =
      std::max(divide_up(on.cut.packs, 2 * kThreads), divide_up(on.cut.edges, 4 * kThreads));
  Params::with(param.scalar_type(), [&](auto param_tag) {
    using Param = typename decltype(param_tag)::type;
    with_float_type(grad.scalar_type(), [&](auto grad_tag) {
      using Grad = typename decltype(grad_tag)::type;
      if constexpr (Rule::kStates == 0) {
        place.launch_over<&one_pass<Rule, Param, Grad, float>>(work, on, rule);
      } else {
        with_state_type(state_type, [&](auto state_tag) {
          using State = typename decltype(state_tag)::type;
          place.launch_over<&one_pass<Rule, Param, Grad, State>>(work, on, rule);
        });
      }
    });
  });
}

}  // namespace xds
