// The CPU kernels of one instruction set, XDS_ISA: plain loops over fp32, which the compiler vectorises.
//
// Compiled without contraction to fused multiply-add, and with correctly rounded division and root, so that
// every instruction set gives the same bits. Nothing of the standard library is used: an inline function
// compiled here for AVX-512 could be what the linker keeps for a processor that lacks it.
#include "kernels.h"
#include "narrow.h"

namespace xds {
namespace XDS_ISA {
namespace {

// Narrow streams are widened here, a piece at a time, and stay in the first cache from load to store.
constexpr int64_t TILE = 1024;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// `count` elements of `data` from `at` on, in fp32: where they lie, or widened into `tile`.
float* widened(void* data, Kind kind, int64_t at, int64_t count, float* tile) {
  if (data == nullptr || kind == Kind::fp32) {
    return data == nullptr ? tile : static_cast<float*>(data) + at;
  }
  const uint16_t* __restrict from = static_cast<const uint16_t*>(data) + at;
  if (kind == Kind::bf16) {
    for (int64_t i = 0; i < count; ++i) tile[i] = from_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) tile[i] = from_fp16(from[i]);
  }
  return tile;
}

void narrowed(const float* __restrict from, void* data, Kind kind, int64_t at, int64_t count) {
  if (kind == Kind::fp32) {
    float* __restrict to = static_cast<float*>(data) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    return;
  }
  uint16_t* __restrict to = static_cast<uint16_t*>(data) + at;
  if (kind == Kind::bf16) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = to_fp16(from[i]);
  }
}

// One pass: load, `rule`, store. A rule works on fp32 [count]: (count, param, grad, state, other state).
template <class Rule>
void pass(const Streams& s, int64_t begin, int64_t end, const Rule& rule) {
  alignas(64) float grads[TILE], first[TILE], second[TILE];
  for (int64_t at = begin; at < end; at += TILE) {
    const int64_t count = least(TILE, end - at);
    float* param = s.param + at;
    const float* grad = widened(const_cast<void*>(s.grad), s.grad_kind, at, count, grads);
    float* m = widened(s.states[0], s.state_kind, at, count, first);
    float* v = widened(s.states[1], s.state_kind, at, count, second);
    rule(at, count, param, grad, m, v);
    if (s.state_kind != Kind::fp32) {
      if (s.states[0] != nullptr) narrowed(m, s.states[0], s.state_kind, at, count);
      if (s.states[1] != nullptr) narrowed(v, s.states[1], s.state_kind, at, count);
    }
    if (s.out != nullptr) narrowed(param, s.out, s.out_kind, at, count);
  }
}

template <bool DECOUPLED>
void adam_tile(const Adam& a, int64_t count, float* __restrict p, const float* __restrict grad,
               float* __restrict m, float* __restrict v) {
  for (int64_t i = 0; i < count; ++i) {
    float param = p[i];
    float g = grad[i] * a.scale;
    if (DECOUPLED) {
      param = param * a.keep;
    } else {
      g = g + param * a.decay;
    }
    const float mean = m[i] + (g - m[i]) * a.gain1;
    const float square = v[i] * a.beta2 + (g * g) * a.gain2;
    m[i] = mean;
    v[i] = square;
    p[i] = param - (mean * a.rate) / (__builtin_sqrtf(square) * a.root + a.eps);
  }
}

void adam(const Streams& s, const Adam& a, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t, int64_t count, float* p, const float* g, float* m, float* v) {
    a.decoupled ? adam_tile<true>(a, count, p, g, m, v) : adam_tile<false>(a, count, p, g, m, v);
  });
}

void lion_tile(const Lion& a, int64_t count, float* __restrict p, const float* __restrict grad,
               float* __restrict m) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale;
    const float way = m[i] + (g - m[i]) * a.gain1;
    const float sign = way > 0.0f ? a.rate : way < 0.0f ? -a.rate : 0.0f;
    p[i] = p[i] * a.keep - sign;
    m[i] = m[i] + (g - m[i]) * a.gain2;
  }
}

void lion(const Streams& s, const Lion& a, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t, int64_t count, float* p, const float* g, float* m, float*) {
    lion_tile(a, count, p, g, m);
  });
}

void adagrad_tile(const Adagrad& a, int64_t count, float* __restrict p, const float* __restrict grad,
                  float* __restrict sum) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale + p[i] * a.decay;
    const float total = sum[i] + g * g;
    sum[i] = total;
    p[i] = p[i] - (g * a.rate) / (__builtin_sqrtf(total) + a.eps);
  }
}

void adagrad(const Streams& s, const Adagrad& a, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t, int64_t count, float* p, const float* g, float* sum, float*) {
    adagrad_tile(a, count, p, g, sum);
  });
}

void sgd_plain(const Sgd& a, int64_t count, float* __restrict p, const float* __restrict grad) {
  for (int64_t i = 0; i < count; ++i) {
    p[i] = p[i] - (grad[i] * a.scale + p[i] * a.decay) * a.rate;
  }
}

template <bool NESTEROV>
void sgd_momentum(const Sgd& a, int64_t count, float* __restrict p, const float* __restrict grad,
                  float* __restrict buffer) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale + p[i] * a.decay;
    const float moving = a.is_first ? g : buffer[i] * a.momentum + g * a.gain;
    buffer[i] = moving;
    p[i] = p[i] - (NESTEROV ? g + moving * a.momentum : moving) * a.rate;
  }
}

void sgd(const Streams& s, const Sgd& a, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t, int64_t count, float* p, const float* g, float* buffer, float*) {
    if (!a.has_momentum) {
      sgd_plain(a, count, p, g);
    } else {
      a.nesterov ? sgd_momentum<true>(a, count, p, g, buffer)
                 : sgd_momentum<false>(a, count, p, g, buffer);
    }
  });
}

// `direction` may be `grad`: both are read and written at the same element only.
void lamb_tile(const Lamb& a, int64_t count, const float* __restrict p, const float* grad,
               float* __restrict m, float* __restrict v, float* direction) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale;
    const float mean = m[i] + (g - m[i]) * a.gain1;
    const float square = v[i] * a.beta2 + (g * g) * a.gain2;
    m[i] = mean;
    v[i] = square;
    direction[i] = (mean * a.first) / (__builtin_sqrtf(square) * a.root + a.eps) + p[i] * a.decay;
  }
}

void lamb_direction(const Streams& s, const Lamb& a, float* direction, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t at, int64_t count, float* p, const float* g, float* m, float* v) {
    lamb_tile(a, count, p, g, m, v, direction + at);
  });
}

void step_tile(int64_t count, float* __restrict p, const float* __restrict direction, float rate) {
  for (int64_t i = 0; i < count; ++i) p[i] = p[i] - direction[i] * rate;
}

void lamb_apply(const Streams& s, const float* direction, float rate, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t at, int64_t count, float* p, const float*, float*, float*) {
    step_tile(count, p, direction + at, rate);
  });
}

// -- sums -------------------------------------------------------------------------------------------------

// Element i is added to lane i mod 32, then the lanes in pairs: one order, whatever the vector's width.
constexpr int64_t LANES = 32;
typedef double Eight __attribute__((vector_size(64)));
typedef float EightFloats __attribute__((vector_size(32), aligned(4)));

double sum_of_lanes(const double* lanes) {
  double sums[LANES];
  for (int64_t i = 0; i < LANES; ++i) sums[i] = lanes[i];
  for (int64_t width = LANES / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) sums[i] = sums[i] + sums[i + width];
  }
  return sums[0];
}

struct Lanes {
  Eight sum[LANES / 8];
};

void add_floats(Lanes& lanes, const float* data, int64_t count) {
  Eight a = lanes.sum[0], b = lanes.sum[1], c = lanes.sum[2], d = lanes.sum[3];
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const EightFloats* here = reinterpret_cast<const EightFloats*>(data + i);
    const Eight w = __builtin_convertvector(here[0], Eight), x = __builtin_convertvector(here[1], Eight);
    const Eight y = __builtin_convertvector(here[2], Eight), z = __builtin_convertvector(here[3], Eight);
    a = a + w * w;
    b = b + x * x;
    c = c + y * y;
    d = d + z * z;
  }
  lanes.sum[0] = a, lanes.sum[1] = b, lanes.sum[2] = c, lanes.sum[3] = d;
  for (int64_t lane = 0; i < count; ++i, ++lane) {
    lanes.sum[lane / 8][lane % 8] += double{data[i]} * double{data[i]};
  }
}

double square_sum(const void* data, Kind kind, int64_t begin, int64_t end) {
  Lanes lanes = {};
  if (kind == Kind::fp64) {
    const double* values = static_cast<const double*>(data);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t lane = (i - begin) % LANES;
      lanes.sum[lane / 8][lane % 8] += values[i] * values[i];
    }
  } else {
    alignas(64) float tile[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
      const int64_t count = least(TILE, end - at);
      add_floats(lanes, widened(const_cast<void*>(data), kind, at, count, tile), count);
    }
  }
  return sum_of_lanes(reinterpret_cast<const double*>(lanes.sum));
}

}  // namespace

const Kernels kernels = {adam, lion, adagrad, sgd, lamb_direction, lamb_apply, square_sum};

}  // namespace XDS_ISA
}  // namespace xds
