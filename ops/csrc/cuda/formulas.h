// The arithmetic of one element for each optimizer, for the device and, in tests, for the host.
//
// A rule holds the constants of a call. `at(t)` computes the values for step t, once per block, in double. Then
// `rule(step, grad, param, state)` returns the new param and writes the new state to `state`, in fp32.
//
// Written so that 1,000 steps stay within 2e-6 of float64. fp32 represents 0.999 only to 1e-8, which together
// with an exact 0.001 shifts a mean by 1e-5, and 1 - 1e-4 only to 3e-8, an error that 1,000 steps multiply. So a
// mean changes by (new - mean) * (1 - beta), and decay is subtracted together with the update.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define XDS_BOTH __host__ __device__ inline
#else
#define XDS_BOTH inline
#endif

namespace xds {

// m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps), of Adam and LAMB
struct Moments {
  double beta1, beta2;
  float rest1, rest2;  // 1 - beta
  float eps;
  bool bias_correction;

  Moments(double beta1, double beta2, double eps, bool bias_correction)
      : beta1(beta1),
        beta2(beta2),
        rest1(static_cast<float>(1.0 - beta1)),
        rest2(static_cast<float>(1.0 - beta2)),
        eps(static_cast<float>(eps)),
        bias_correction(bias_correction) {}

  struct Step {
    float mean_factor, root_factor;
  };

  XDS_BOTH Step at(double t) const {
    if (!bias_correction) return {1.0f, 1.0f};
    return {
        static_cast<float>(1.0 / (1.0 - pow(beta1, t))),
        static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, t)))};
  }

  XDS_BOTH float operator()(const Step& step, float grad, float (&state)[2]) const {
    state[0] += (grad - state[0]) * rest1;
    // a mean that overflowed stays inf, and its element stops, as in v * b2 + ...; inf - inf would be nan
    const float squares = state[1] + (grad * grad - state[1]) * rest2;
    state[1] = state[1] < INFINITY ? squares : state[1];
    return state[0] * step.mean_factor / (sqrtf(state[1]) * step.root_factor + eps);
  }
};

struct Adam {
  static constexpr int kStates = 2;
  using Step = Moments::Step;

  Moments moments;
  float lr;
  float decay;  // lr * weight_decay where decoupled
  float l2;     // weight_decay where it is not

  Adam(double lr, Moments moments, double weight_decay, bool decoupled)
      : moments(moments),
        lr(static_cast<float>(lr)),
        decay(decoupled ? static_cast<float>(lr * weight_decay) : 0.0f),
        l2(decoupled ? 0.0f : static_cast<float>(weight_decay)) {}

  XDS_BOTH Step at(double t) const { return moments.at(t); }

  XDS_BOTH float operator()(const Step& step, float grad, float param, float (&state)[2]) const {
    grad += l2 * param;
    return param - (decay * param + lr * moments(step, grad, state));
  }
};

// Adam whose variance stays.
struct FrozenAdam {
  static constexpr int kStates = 2;
  struct Step {};

  float rate, rest1, root, eps, decay;  // rest1: 1 - beta1, or 1 where the gradient is the new momentum
  float limit;                          // of a change, without weight decay
  bool is_momentum;

  FrozenAdam(
      double rate, double beta1, double root, double eps, double decay, double limit, bool is_momentum)
      : rate(static_cast<float>(rate)),
        rest1(static_cast<float>(1.0 - beta1)),
        root(static_cast<float>(root)),
        eps(static_cast<float>(eps)),
        decay(static_cast<float>(decay)),
        limit(static_cast<float>(limit)),
        is_momentum(is_momentum) {}

  XDS_BOTH Step at(double) const { return {}; }

  XDS_BOTH float operator()(const Step&, float grad, float param, float (&state)[2]) const {
    state[0] = is_momentum ? grad : state[0] + (grad - state[0]) * rest1;
    const float full = state[0] * rate / (sqrtf(state[1]) * root + eps);
    const float below = full > limit ? limit : full;  // fminf would drop a nan
    const float change = (below < -limit ? -limit : below) + decay * param;
    return state[1] > 0.0f ? param - change : param;
  }
};

struct Lion {
  static constexpr int kStates = 1;
  struct Step {};

  float lr, rest1, rest2;  // rest: 1 - beta
  float decay;             // lr * weight_decay

  Lion(double lr, double beta1, double beta2, double weight_decay)
      : lr(static_cast<float>(lr)),
        rest1(static_cast<float>(1.0 - beta1)),
        rest2(static_cast<float>(1.0 - beta2)),
        decay(static_cast<float>(lr * weight_decay)) {}

  XDS_BOTH Step at(double) const { return {}; }

  XDS_BOTH float operator()(const Step&, float grad, float param, float (&state)[1]) const {
    const float change = grad - state[0];
    const float blend = state[0] + change * rest1;
    state[0] += change * rest2;
    const float sign = blend > 0.0f ? 1.0f : blend < 0.0f ? -1.0f : blend;  // 0 and nan stay
    return param - (decay * param + lr * sign);
  }
};

struct Adagrad {
  static constexpr int kStates = 1;
  struct Step {
    float rate;
  };

  double lr, lr_decay;
  float eps, l2;

  XDS_BOTH Step at(double t) const { return {static_cast<float>(lr / (1.0 + (t - 1.0) * lr_decay))}; }

  XDS_BOTH float operator()(const Step& step, float grad, float param, float (&state)[1]) const {
    grad += l2 * param;
    state[0] += grad * grad;
    return param - step.rate * (grad / (sqrtf(state[0]) + eps));
  }
};

struct Sgd {
  static constexpr int kStates = 0;
  struct Step {};

  float lr, l2;

  XDS_BOTH Step at(double) const { return {}; }

  XDS_BOTH float operator()(const Step&, float grad, float param, float (&)[1]) const {
    grad += l2 * param;
    return param - lr * grad;
  }
};

struct SgdMomentum {
  static constexpr int kStates = 1;
  struct Step {
    bool is_first;
  };

  float lr, momentum, rest_dampening, l2;
  bool nesterov;

  XDS_BOTH Step at(double t) const { return {t == 1.0}; }

  XDS_BOTH float operator()(const Step& step, float grad, float param, float (&state)[1]) const {
    grad += l2 * param;
    state[0] = step.is_first ? grad : momentum * state[0] + rest_dampening * grad;
    return param - lr * (nesterov ? grad + momentum * state[0] : state[0]);
  }
};

}  // namespace xds
