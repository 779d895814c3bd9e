// Registers the CPU ops with torch: checks arguments, selects an instruction set, splits work over torch's threads.
//
// Results depend neither on the number of threads nor on the instruction set.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "coded.h"
#include "kernels.h"

namespace xds {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t GRAIN = 1 << 15;  // minimum number of elements per thread
constexpr int64_t BLOCK = 1 << 12;  // elements of one partial sum

#if defined(__x86_64__)
const Kernels& kernels() { return of_isa(baseline::kernels, avx2::kernels, avx512::kernels); }
#else
const Kernels& kernels() { return of_isa(baseline::kernels, baseline::kernels, baseline::kernels); }
#endif

// -- arguments --------------------------------------------------------------------------------------------

float scalar(const OptionalTensor& tensor, const char* name, float otherwise) {
  return tensor.has_value() ? *wide(*tensor, name, 1) : otherwise;
}

bool skips(const OptionalTensor& found_inf) { return scalar(found_inf, "found_inf", 0.0f) != 0.0f; }

// A state: [n], or where `row_type` is its dtype rows of 8 bits.
void* state_of(const Tensor& state, const char* name, int64_t numel, ScalarType row_type, Kind* kind) {
  if (state.scalar_type() != row_type) return stream(state, name, numel, kind);
  STD_TORCH_CHECK(numel % ROW_NUMEL == 0, "rows of 8 bits have a multiple of 256 elements, and not ", numel);
  check_flat(state, name, numel / ROW_NUMEL * ROW_BYTES);
  *kind = Kind::rows;
  return state.data_ptr();
}

Streams streams_of(const Tensor& param, const Tensor* grad, const Tensor* first, const Tensor* second,
                   const OptionalTensor& out, bool takes_edits = false) {
  const int64_t numel = param.numel();
  Streams s = {};
  s.param = stream(param, "param", numel, &s.param_kind);
  if (grad != nullptr) s.grad = stream(*grad, "grad", numel, &s.grad_kind);
  if (first != nullptr) s.states[0] = state_of(*first, "the state", numel, ScalarType::Char, &s.state_kind);
  if (second != nullptr) {
    const Kind kind = s.state_kind;
    s.states[1] = state_of(*second, "the second state", numel, ScalarType::Byte, &s.state_kind);
    STD_TORCH_CHECK(kind == s.state_kind, "both states must have one dtype");
  }
  STD_TORCH_CHECK(s.state_kind != Kind::fp16, "states must be float32 or bfloat16");
  if (out.has_value()) s.out = stream(*out, "out", numel, &s.out_kind);
  STD_TORCH_CHECK(!takes_edits || (out.has_value() && s.out_kind != Kind::fp32),
                  "takes_edits needs an out that is bfloat16 or float16");
  s.takes_edits = takes_edits;
  return s;
}

// The step reads the values before it from these: all are given, or none.
void read_from(Streams& s, int64_t numel, const OptionalTensor& param, const OptionalTensor& first,
               const OptionalTensor& second = std::nullopt) {
  const OptionalTensor* olds[] = {&first, &second};
  for (int i = 0; i < 2; ++i) {
    STD_TORCH_CHECK(olds[i]->has_value() == (param.has_value() && s.states[i] != nullptr),
                    "old values of param and of all states are needed, or none");
    if (!olds[i]->has_value()) continue;
    Kind kind;
    const ScalarType row_type = i == 0 ? ScalarType::Char : ScalarType::Byte;
    s.old_states[i] = state_of(**olds[i], "an old state", numel, row_type, &kind);
    STD_TORCH_CHECK(kind == s.state_kind, "an old state must have the dtype of the state");
  }
  if (!param.has_value()) return;
  Kind kind;
  s.old_param = stream(*param, "old_param", numel, &kind);
  STD_TORCH_CHECK(kind == s.param_kind, "old_param must have the dtype of param");
}

// The ops whose master weights are fp32, and whose states have no 8 bits.
void needs_wide(const Streams& s) {
  STD_TORCH_CHECK(s.param_kind == Kind::fp32, "param must be float32");
  STD_TORCH_CHECK(s.state_kind != Kind::rows, "states must be float32 or bfloat16");
}

// low: the lower halves of master weights whose upper ones are `param`. rounds_away: `out` is rounded as they are.
void use_halves(Streams& s, const OptionalTensor& low, bool rounds_away, int64_t numel) {
  if (rounds_away && s.out_kind == Kind::bf16) s.out_kind = Kind::upper;
  if (!low.has_value()) return;
  check_flat(*low, "low", numel);
  STD_TORCH_CHECK(low->scalar_type() == ScalarType::Short, "low must be int16");
  STD_TORCH_CHECK(s.param_kind == Kind::bf16 && s.old_param == nullptr && s.out == nullptr,
                  "low needs a param that is bfloat16, and neither old values nor out");
  s.low = static_cast<uint16_t*>(low->data_ptr());
}

Draws draws_of(const OptionalTensor& rows, const Tensor& step) {
  if (!rows.has_value()) return {};
  check_flat(*rows, "draws", rows->numel());
  STD_TORCH_CHECK(rows->scalar_type() == ScalarType::Long && rows->numel() >= 3 && rows->numel() % 3 == 0,
                  "draws must be int64 [k, 3], k at least 1");
  return {static_cast<const int64_t*>(rows->data_ptr()), rows->numel() / 3,
          static_cast<uint32_t>(*wide(step, "step", 1))};
}

// -- elementwise optimizers -------------------------------------------------------------------------------

template <class Rule>
using Run = void (*)(const Streams&, const Rule&, int64_t, int64_t);

template <class Rule>
void spread(int64_t numel, Run<Rule> run, const Streams& s, const Rule& rule) {
  const int64_t unit = s.state_kind == Kind::rows ? ROW_NUMEL : 1;  // a row is not divided
  torch::stable::parallel_for(0, numel / unit, GRAIN / unit,
                              [&](int64_t begin, int64_t end) { run(s, rule, begin * unit, end * unit); });
}

// 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)
struct Correction {
  double first = 1.0, root = 1.0;
  Correction(const Tensor& step, double beta1, double beta2, bool applies) {
    const double t = *wide(step, "step", 1);
    if (applies) {
      first = 1.0 / (1.0 - std::pow(beta1, t));
      root = 1.0 / std::sqrt(1.0 - std::pow(beta2, t));
    }
  }
};

float rounded(double value) { return static_cast<float>(value); }

void adam(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
          const OptionalTensor& out, const Tensor& step, const OptionalTensor& scale,
          const OptionalTensor& found_inf, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool decoupled, bool bias_correction, bool takes_edits,
          const OptionalTensor& old_param, const OptionalTensor& old_exp_avg,
          const OptionalTensor& old_exp_avg_sq, const OptionalTensor& draws, const OptionalTensor& low,
          bool rounds_away) {
  Streams s = streams_of(param, &grad, &exp_avg, &exp_avg_sq, out, takes_edits);
  read_from(s, param.numel(), old_param, old_exp_avg, old_exp_avg_sq);
  s.draws = draws_of(draws, step);
  use_halves(s, low, rounds_away, param.numel());
  const Correction correction(step, beta1, beta2, bias_correction);
  Adam rule = {};
  rule.decoupled = decoupled;
  rule.scale = scalar(scale, "scale", 1.0f);
  rule.decay = rounded(decoupled ? lr * weight_decay : weight_decay);
  rule.gain1 = rounded(1.0 - beta1);
  rule.gain2 = rounded(1.0 - beta2);
  rule.rate = rounded(lr * correction.first);
  rule.root = rounded(correction.root);
  rule.eps = rounded(eps);
  if (!skips(found_inf)) spread(param.numel(), kernels().adam, s, rule);
}

void frozen_adam(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                 const OptionalTensor& out, const OptionalTensor& scale, const OptionalTensor& found_inf,
                 double rate, double beta1, double root, double eps, double decay, double limit, bool is_momentum,
                 bool takes_edits, const OptionalTensor& old_param, const OptionalTensor& old_exp_avg,
                 const OptionalTensor& old_exp_avg_sq) {
  Streams s = streams_of(param, &grad, &exp_avg, &exp_avg_sq, out, takes_edits);
  read_from(s, param.numel(), old_param, old_exp_avg, old_exp_avg_sq);
  needs_wide(s);
  const FrozenAdam rule = {scalar(scale, "scale", 1.0f), rounded(decay), is_momentum ? 1.0f : rounded(1.0 - beta1),
                           rounded(rate), rounded(root), rounded(eps), rounded(limit)};
  if (!skips(found_inf)) spread(param.numel(), kernels().frozen_adam, s, rule);
}

void lion(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const OptionalTensor& out,
          const OptionalTensor& scale, const OptionalTensor& found_inf, double lr, double beta1,
          double beta2, double weight_decay, bool takes_edits, const OptionalTensor& old_param,
          const OptionalTensor& old_exp_avg, const OptionalTensor& step, const OptionalTensor& draws,
          const OptionalTensor& low, bool rounds_away) {
  Streams s = streams_of(param, &grad, &exp_avg, nullptr, out, takes_edits);
  read_from(s, param.numel(), old_param, old_exp_avg);
  STD_TORCH_CHECK(step.has_value() || !draws.has_value(), "draws need the number of the step");
  if (step.has_value()) s.draws = draws_of(draws, *step);
  use_halves(s, low, rounds_away, param.numel());
  const Lion rule = {scalar(scale, "scale", 1.0f), rounded(lr * weight_decay),
                     rounded(1.0 - beta1), rounded(1.0 - beta2), rounded(lr)};
  if (!skips(found_inf)) spread(param.numel(), kernels().lion, s, rule);
}

void adagrad(const Tensor& param, const Tensor& grad, const Tensor& state_sum,
             const OptionalTensor& out, const Tensor& step, const OptionalTensor& scale,
             const OptionalTensor& found_inf, double lr, double lr_decay, double eps,
             double weight_decay, bool takes_edits, const OptionalTensor& old_param,
             const OptionalTensor& old_state_sum) {
  Streams s = streams_of(param, &grad, &state_sum, nullptr, out, takes_edits);
  read_from(s, param.numel(), old_param, old_state_sum);
  needs_wide(s);
  const double t = *wide(step, "step", 1);
  const Adagrad rule = {scalar(scale, "scale", 1.0f), rounded(weight_decay),
                        rounded(lr / (1.0 + (t - 1.0) * lr_decay)), rounded(eps)};
  if (!skips(found_inf)) spread(param.numel(), kernels().adagrad, s, rule);
}

void sgd(const Tensor& param, const Tensor& grad, const OptionalTensor& momentum_buffer,
         const OptionalTensor& out, const Tensor& step, const OptionalTensor& scale,
         const OptionalTensor& found_inf, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, bool takes_edits, const OptionalTensor& old_param,
         const OptionalTensor& old_momentum_buffer) {
  const Tensor* buffer = momentum_buffer.has_value() ? &*momentum_buffer : nullptr;
  Streams s = streams_of(param, &grad, buffer, nullptr, out, takes_edits);
  read_from(s, param.numel(), old_param, old_momentum_buffer);
  needs_wide(s);
  Sgd rule = {};
  rule.is_first = *wide(step, "step", 1) <= 1.0f;
  rule.has_momentum = buffer != nullptr;
  rule.nesterov = nesterov;
  rule.scale = scalar(scale, "scale", 1.0f);
  rule.decay = rounded(weight_decay);
  rule.momentum = rounded(momentum);
  rule.gain = rounded(1.0 - dampening);
  rule.rate = rounded(lr);
  if (!skips(found_inf)) spread(param.numel(), kernels().sgd, s, rule);
}

// -- sums and LAMB ----------------------------------------------------------------------------------------

// A part of [0, numel), divided into blocks from its own beginning, so that a sum depends on the part only.
struct Block {
  int64_t begin, end, part;  // part -1: a gap between parameters
};

const int64_t* bounds_of(const Tensor& bounds, int64_t numel) {
  check_flat(bounds, "bounds", bounds.numel());
  STD_TORCH_CHECK(bounds.scalar_type() == ScalarType::Long && bounds.numel() >= 1,
                  "bounds must be int64 with one element more than there are parts");
  const int64_t* found = static_cast<const int64_t*>(bounds.data_ptr());
  const int64_t parts = bounds.numel() - 1;
  for (int64_t i = 0; i <= parts; ++i) {
    STD_TORCH_CHECK(found[i] >= (i == 0 ? 0 : found[i - 1]) && found[i] <= numel, "bounds[", i,
                    "] = ", found[i], " must not fall, and lie in [0, ", numel, "]");
  }
  return found;
}

void cut(std::vector<Block>& blocks, int64_t begin, int64_t end, int64_t part) {
  for (int64_t at = begin; at < end; at += BLOCK) {
    blocks.push_back({at, std::min(at + BLOCK, end), part});
  }
}

std::vector<Block> blocks_of(const int64_t* bounds, int64_t parts, int64_t numel) {
  std::vector<Block> blocks;
  blocks.reserve(static_cast<size_t>(numel / BLOCK + parts + 2));
  cut(blocks, 0, bounds[0], -1);
  for (int64_t part = 0; part < parts; ++part) cut(blocks, bounds[part], bounds[part + 1], part);
  cut(blocks, bounds[parts], numel, -1);
  return blocks;
}

template <class Work>
void spread_blocks(const std::vector<Block>& blocks, const Work& work) {
  const int64_t count = static_cast<int64_t>(blocks.size());
  torch::stable::parallel_for(0, count, GRAIN / BLOCK, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(static_cast<size_t>(i));
  });
}

Tensor square_sum(const Tensor& flat) {
  const int64_t numel = flat.numel();
  check_flat(flat, "flat", numel);
  const Kind kind = kind_of(flat, "flat");
  const void* data = flat.data_ptr();
  const Kernels& chosen = kernels();
  std::vector<double> sums(static_cast<size_t>((numel + BLOCK - 1) / BLOCK));
  torch::stable::parallel_for(
      0, static_cast<int64_t>(sums.size()), GRAIN / BLOCK, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          sums[static_cast<size_t>(i)] =
              chosen.square_sum(data, kind, i * BLOCK, std::min((i + 1) * BLOCK, numel));
        }
      });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  Tensor result = torch::stable::new_empty(flat, {}, ScalarType::Double);
  *static_cast<double*>(result.data_ptr()) = total;
  return result;
}

void lamb_direction(const Tensor& param, const Tensor& grad, const Tensor& exp_avg,
                    const Tensor& exp_avg_sq, const Tensor& direction, const Tensor& square_norms,
                    const Tensor& bounds, const Tensor& step, const OptionalTensor& scale,
                    const OptionalTensor& found_inf, double beta1, double beta2, double eps,
                    double weight_decay, bool bias_correction) {
  const int64_t numel = param.numel();
  const Streams s = streams_of(param, &grad, &exp_avg, &exp_avg_sq, std::nullopt);
  needs_wide(s);
  float* const way = wide(direction, "direction", numel);
  const int64_t* const cuts = bounds_of(bounds, numel);
  const int64_t parts = bounds.numel() - 1;
  check_flat(square_norms, "square_norms", 2 * parts);
  STD_TORCH_CHECK(square_norms.scalar_type() == ScalarType::Double, "square_norms must be float64");
  double* const norms = static_cast<double*>(square_norms.data_ptr());
  const Correction correction(step, beta1, beta2, bias_correction);
  if (skips(found_inf)) return;
  const Lamb rule = {scalar(scale, "scale", 1.0f), rounded(weight_decay), rounded(1.0 - beta1),
                     rounded(1.0 - beta2), rounded(correction.first), rounded(correction.root),
                     rounded(eps)};
  const Kernels& chosen = kernels();
  const std::vector<Block> blocks = blocks_of(cuts, parts, numel);
  std::vector<double> sums(2 * blocks.size());
  spread_blocks(blocks, [&](size_t i) {
    const Block& block = blocks[i];
    chosen.lamb_direction(s, rule, way, block.begin, block.end);
    sums[2 * i] = chosen.square_sum(s.param, Kind::fp32, block.begin, block.end);
    sums[2 * i + 1] = chosen.square_sum(way, Kind::fp32, block.begin, block.end);
  });
  std::fill(norms, norms + 2 * parts, 0.0);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].part < 0) continue;
    norms[2 * blocks[i].part] += sums[2 * i];
    norms[2 * blocks[i].part + 1] += sums[2 * i + 1];
  }
}

void lamb_apply(const Tensor& param, const Tensor& direction, const OptionalTensor& out,
                const Tensor& bounds, const Tensor& rates, const OptionalTensor& found_inf) {
  const int64_t numel = param.numel();
  const Streams s = streams_of(param, nullptr, nullptr, nullptr, out);
  needs_wide(s);
  const float* const way = wide(direction, "direction", numel);
  const int64_t* const cuts = bounds_of(bounds, numel);
  const int64_t parts = bounds.numel() - 1;
  const float* const rate = wide(rates, "rates", parts);
  if (skips(found_inf)) return;
  const Kernels& chosen = kernels();
  const std::vector<Block> blocks = blocks_of(cuts, parts, numel);
  spread_blocks(blocks, [&](size_t i) {
    const Block& block = blocks[i];
    chosen.lamb_apply(s, way, block.part < 0 ? 0.0f : rate[block.part], block.begin, block.end);
  });
}

}  // namespace
}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CPU, m) {
  m.impl("adam_", TORCH_BOX(&xds::adam));
  m.impl("frozen_adam_", TORCH_BOX(&xds::frozen_adam));
  m.impl("lion_", TORCH_BOX(&xds::lion));
  m.impl("adagrad_", TORCH_BOX(&xds::adagrad));
  m.impl("sgd_", TORCH_BOX(&xds::sgd));
  m.impl("lamb_direction_", TORCH_BOX(&xds::lamb_direction));
  m.impl("lamb_apply_", TORCH_BOX(&xds::lamb_apply));
  m.impl("square_sum", TORCH_BOX(&xds::square_sum));
}
