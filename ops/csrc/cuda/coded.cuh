// One pass over states of 8 bits: see ops/coded.py for the rows. A warp has one row, a lane 8 elements of it.
#pragma once

#include "one_pass.cuh"

namespace xds {

constexpr int kCoded = 256, kCodedBytes = kCoded + 4;
constexpr int kCodedAtOnce = kThreads / 32;  // of a block
constexpr int kMeanLevels = 128, kSquareLevels = 256;  // 8 of each exponent
constexpr int kLargest = 0x7f7fffff;  // finite

__device__ inline int bits_without_sign(float value) { return static_cast<int>(word_of(value) & 0x7fffffffu); }

__device__ inline float value_of(int bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// state 0 has means, and state 1 squares
__device__ inline float decoded(int state, unsigned char byte, int base) {
  if (state == 1) return value_of(base == 0 ? 0 : (base + byte) << 20);
  const int code = static_cast<signed char>(byte), size = code < 0 ? -code : code;
  const float value = value_of(code == 0 ? 0 : (base + size) << 20);
  return code < 0 ? -value : value;
}

// The base of the row of this warp, of which a lane has 8 values.
__device__ inline int base_for(const float (&values)[8], int levels) {
  int largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int bits = bits_without_sign(values[i]);
    largest = bits > largest ? bits : largest;
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    const int theirs = static_cast<int>(__shfl_xor_sync(0xffffffffu, largest, apart));
    largest = theirs > largest ? theirs : largest;
  }
  const int exponent = (largest < kLargest ? largest : kLargest) >> 23;
  const int above = 8 * (exponent + 1) - levels;
  return exponent == 0 ? 0 : above < 8 ? 8 : above;
}

__device__ inline unsigned char encoded(int state, float value, int base, int part) {
  if (base == 0) return 0;
  const int levels = state == 0 ? kMeanLevels : kSquareLevels, bits = bits_without_sign(value);
  const int next = (((bits < kLargest ? bits : kLargest) + part) >> 20) - base;
  const int size = next < 0 ? 0 : next < levels ? next : levels - 1;
  return static_cast<unsigned char>(state == 0 && value < 0.0f ? -size : size);
}

// kWide: neighbours that a lane reads at once, 4 where the tensors are aligned.
template <int kWide, class Rule, class Param, class Grad>
__global__ void __launch_bounds__(kThreads) pass_rows(Operands<Rule::kStates> on, Rule rule, int64_t rows) {
  if (skips(on.found_inf)) return;
  constexpr int kStates = Rule::kStates, kUnroll = 8 / kWide;
  __shared__ typename Rule::Step shared_step;
  if (threadIdx.x == 0) shared_step = rule.at(number_or(on.step, 1.0f));
  __syncthreads();
  const typename Rule::Step step = shared_step;
  const float scale = number_or(on.scale, 1.0f);
  const int lane = threadIdx.x % 32;
  Drawer drawer(on.draws, number_or(on.step, 1.0f));
  Param* const params = static_cast<Param*>(on.param);
  for (int64_t row = int64_t(blockIdx.x) * kCodedAtOnce + threadIdx.x / 32; row < rows;
       row += int64_t(gridDim.x) * kCodedAtOnce) {
    float values[kStates][8];
    int draws[8];
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const unsigned char* codes = static_cast<const unsigned char*>(on.states[s]) + row * kCodedBytes;
      int base;
      memcpy(&base, codes + kCoded, sizeof(base));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        unsigned char mine[kWide];
        memcpy(mine, codes + (u * 32 + lane) * kWide, kWide);
#pragma unroll
        for (int i = 0; i < kWide; ++i) values[s][u * kWide + i] = decoded(s, mine[i], base);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = row * kCoded + (u * 32 + lane) * kWide;
      Pack<Param, kWide> param = load<kWide>(params + at);
      const Pack<Grad, kWide> grad = load<kWide>(static_cast<const Grad*>(on.grad) + at);
      Pack<unsigned short, kWide> low;
      if constexpr (std::is_same_v<Param, Upper>) low = load<kWide>(on.low + at);
      Pack<float, kWide> wide;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        if constexpr (std::is_same_v<Param, Upper>) {
          wide.at[i] = param.at[i].joined(low.at[i]);
        } else {
          wide.at[i] = static_cast<float>(param.at[i]);
        }
      }
      if (on.takes_edits)
        take_edits<kWide>(on.out, load<kWide>(static_cast<const unsigned short*>(on.out.data) + at), wide);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const int mine = u * kWide + i;
        float state[kStates];
#pragma unroll
        for (int s = 0; s < kStates; ++s) state[s] = values[s][mine];
        wide.at[i] = rule(step, static_cast<float>(grad.at[i]) * scale, wide.at[i], state);
#pragma unroll
        for (int s = 0; s < kStates; ++s) values[s][mine] = state[s];
        const uint32_t draw = drawer.is_on() ? drawer.at(at + i) : 0;
        draws[mine] = drawer.is_on() ? static_cast<int>(draw << 4) : 1 << 19;
        if constexpr (std::is_same_v<Param, Upper>) low.at[i] = lower_half(wide.at[i]);
        param.at[i] =
            drawer.is_on() ? rounded_by<Param>(wide.at[i], draw) : static_cast<Param>(wide.at[i]);
      }
      store<kWide>(params + at, param);
      if constexpr (std::is_same_v<Param, Upper>) store<kWide>(on.low + at, low);
      store_out<kWide>(on.out, at, wide);
    }
    __syncwarp();  // all lanes have read the bases
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      unsigned char* codes = static_cast<unsigned char*>(on.states[s]) + row * kCodedBytes;
      const int base = base_for(values[s], s == 0 ? kMeanLevels : kSquareLevels);
      if (lane == 0) memcpy(codes + kCoded, &base, sizeof(base));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        unsigned char mine[kWide];
#pragma unroll
        for (int i = 0; i < kWide; ++i)
          mine[i] = encoded(s, values[s][u * kWide + i], base, draws[u * kWide + i]);
        memcpy(codes + (u * 32 + lane) * kWide, mine, kWide);
      }
    }
  }
}

inline bool has_rows(const MaybeTensor& state) {
  return state.has_value() && state->scalar_type() == ScalarType::Char;
}

// As `launch_one_pass`, where states have 8 bits.
template <class Params, class Rule>
void launch_rows(
    const char* op, const Rule& rule, const Tensor& param, const Tensor& grad,
    const MaybeTensor (&states)[2], const char* const (&state_names)[2], const MaybeTensor& out,
    const MaybeTensor& step, const MaybeTensor& scale, const MaybeTensor& found_inf, bool takes_edits,
    const MaybeTensor& draws = {}, const Division& division = {}) {
  const Checks check(op, "param", param);
  Operands<Rule::kStates> on = operands_of<Params, Rule>(
      check, param, grad, out, step, scale, found_inf, takes_edits, draws, division);
  const int64_t rows = param.numel() / kCoded;
  check.that(param.numel() % kCoded == 0, "states of 8 bits need a multiple of 256 elements");
  for (int s = 0; s < Rule::kStates; ++s) {
    check.on_device(*states[s], state_names[s], {s == 0 ? ScalarType::Char : ScalarType::Byte});
    check.that(states[s]->numel() == rows * kCodedBytes, "states of 8 bits need rows of 260 bytes");
    on.states[s] = states[s]->mutable_data_ptr();
  }
  if (rows == 0) return;
  const MaybeTensor all[] = {param, grad};
  const bool is_aligned = cut_of(param.numel(), {&all[0], &all[1], &out, &division.low}).packs == param.numel() / 4;
  const Place place(param);
  const int64_t work = divide_up(rows, kCodedAtOnce);
  Params::with(param.scalar_type(), [&](auto param_tag) {
    using Param = typename decltype(param_tag)::type;
    with_float_type(grad.scalar_type(), [&](auto grad_tag) {
      using Grad = typename decltype(grad_tag)::type;
      is_aligned ? place.launch_over<&pass_rows<4, Rule, Param, Grad>>(work, on, rule, rows)
                 : place.launch_over<&pass_rows<1, Rule, Param, Grad>>(work, on, rule, rows);
    });
  });
}

}  // namespace xds
