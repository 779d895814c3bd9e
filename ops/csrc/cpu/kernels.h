// The interface of the CPU kernels, equal for every instruction set: kernels.cpp is compiled once for each.
#pragma once

#include <cstdint>

namespace xds {

// rows: of 8 bits, see coded.h; states alone. upper: bf16, rounded as `upper_half`; `out` alone.
enum class Kind : int { fp32, bf16, fp16, rows, upper };

// The random numbers of stochastic rounding: one of 16 bits for each element, by the index of the element in its
// parameter, the parameter's key and the number of the step. rows [num_rows][3], nullptr where values are rounded to
// nearest: the first element of a run, its index in the parameter, and the key.
struct Draws {
  const int64_t* rows;
  int64_t num_rows;
  uint32_t step;
};

// The memory that an elementwise optimizer reads and writes once, each [n].
struct Streams {
  void* param;
  Kind param_kind;
  uint16_t* low;  // the lower halves of fp32 values, of which a bf16 `param` has the upper ones, or nullptr
  const void* grad;
  Kind grad_kind;
  void* states[2];  // nullptr where the optimizer has fewer
  Kind state_kind;
  void* out;  // receives the new values in the compute dtype, or nullptr
  Kind out_kind;
  bool takes_edits;  // `out`, of 16 bits, is `param` rounded, except where a script wrote a new value
  Draws draws;  // for a `param` of 16 bits, the last state if it is bf16, and states of 8 bits
  // Where the values before the step are, if not in `param` and `states`. These are not changed.
  const void* old_param;
  const void* old_states[2];
};

// The update of one element in one step. Coefficients are computed once, in double, and rounded to fp32.
struct Adam {
  bool decoupled;
  float scale, decay;  // g = scale * grad; p -= decay * p, or g += decay * p
  float gain1, gain2;  // 1 - beta
  float rate, root, eps;  // p -= rate * m / (root * sqrt(v) + eps)
};

// The update of Adam whose variance stays. gain1 is 1 where the gradient is the new momentum. limit: of a change.
struct FrozenAdam {
  float scale, decay, gain1, rate, root, eps, limit;
};

struct Lion {
  float scale, decay, gain1, gain2, rate;
};

struct Adagrad {
  float scale, decay, rate, eps;
};

struct Sgd {
  bool is_first, has_momentum, nesterov;
  float scale, decay, momentum, gain, rate;  // gain: 1 - dampening
};

struct Lamb {
  float scale, decay, gain1, gain2, first, root, eps;  // d = first * m / (root * sqrt(v) + eps) + decay * p
};

// The kernels of one instruction set. Ranges are elements [begin, end).
struct Kernels {
  void (*adam)(const Streams&, const Adam&, int64_t begin, int64_t end);
  void (*frozen_adam)(const Streams&, const FrozenAdam&, int64_t begin, int64_t end);
  void (*lion)(const Streams&, const Lion&, int64_t begin, int64_t end);
  void (*adagrad)(const Streams&, const Adagrad&, int64_t begin, int64_t end);
  void (*sgd)(const Streams&, const Sgd&, int64_t begin, int64_t end);
  // `direction` [n] fp32 may be the gradient's own memory
  void (*lamb_direction)(const Streams&, const Lamb&, float* direction, int64_t begin, int64_t end);
  void (*lamb_apply)(const Streams&, const float* direction, float rate, int64_t begin, int64_t end);
  double (*square_sum)(const void* data, Kind kind, int64_t begin, int64_t end);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace xds
