// The CPU kernels for one instruction set, XDS_ISA: plain fp32 loops that the compiler vectorises.
//
// Compiled without contraction to fused multiply-add, and with correctly rounded division and square root, so
// that every instruction set gives the same bits. The standard library is not used: the linker could keep an
// inline function that was compiled here for AVX-512, and a processor without AVX-512 would then run it.
#include "coded.h"
#include "kernels.h"
#include "narrow.h"

#define INLINE inline __attribute__((always_inline))

namespace xds {
namespace XDS_ISA {
namespace {

// A stream is processed GROUP elements at a time. GROUP is a constant, so that a group with a narrow dtype is
// widened, used and narrowed in registers and the L1 cache.
constexpr int64_t GROUP = 64;
// The prefetch distance. The hardware prefetcher restarts at each page of 4 KiB, and this many streams reach a
// new page every few hundred cycles.
constexpr int64_t AHEAD = 512;
constexpr int64_t LINE_BYTES = 64;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t bytes_of(Kind kind) { return kind == Kind::fp32 ? 4 : 2; }

INLINE void fetch(const void* data, Kind kind, int64_t at, int64_t count, bool to_write) {
  if (data == nullptr) return;
  const char* from = static_cast<const char*>(data) + at * bytes_of(kind);
  for (int64_t i = 0; i < count * bytes_of(kind); i += LINE_BYTES) {
    to_write ? __builtin_prefetch(from + i, 1, 3) : __builtin_prefetch(from + i, 0, 3);
  }
}

// `count` elements of `data` from `at` on, in fp32: in place, or widened into `group`.
inline float* widened(void* data, Kind kind, int64_t at, int64_t count, float* group) {
  if (data == nullptr) return nullptr;
  if (kind == Kind::fp32) return static_cast<float*>(data) + at;
  const uint16_t* __restrict from = static_cast<const uint16_t*>(data) + at;
  if (kind == Kind::bf16) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) group[i] = from_bf16(from[i]);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) group[i] = from_fp16(from[i]);
  }
  return group;
}

inline void narrowed(const float* __restrict from, void* data, Kind kind, int64_t at, int64_t count) {
  if (data == nullptr) return;
  if (kind == Kind::fp32) {
    float* __restrict to = static_cast<float*>(data) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    return;
  }
  uint16_t* __restrict to = static_cast<uint16_t*>(data) + at;
  if (kind == Kind::bf16) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
  } else if (kind == Kind::upper) {
    for (int64_t i = 0; i < count; ++i) to[i] = upper_half(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = to_fp16(from[i]);
  }
}

// Where `out` differs from `param` rounded, bit for bit, a script has written it: it becomes the value.
inline void edits_taken(float* __restrict param, const void* out, Kind kind, int64_t at, int64_t count) {
  const uint16_t* __restrict from = static_cast<const uint16_t*>(out) + at;
  uint32_t differs = 0;
  if (kind == Kind::bf16) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) differs |= uint32_t{to_bf16(param[i])} ^ from[i];
    if (differs == 0) return;
    for (int64_t i = 0; i < count; ++i) {
      if (to_bf16(param[i]) != from[i]) param[i] = from_bf16(from[i]);
    }
  } else if (kind == Kind::upper) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) differs |= uint32_t{upper_half(param[i])} ^ from[i];
    if (differs == 0) return;
    for (int64_t i = 0; i < count; ++i) {
      if (upper_half(param[i]) != from[i]) param[i] = from_bf16(from[i]);
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) differs |= uint32_t{to_fp16(param[i])} ^ from[i];
    if (differs == 0) return;
    for (int64_t i = 0; i < count; ++i) {
      if (to_fp16(param[i]) != from[i]) param[i] = from_fp16(from[i]);
    }
  }
}

// `param` [count] from `at` on in fp32: in place, or in `group`.
inline float* params_of(const Streams& s, int64_t at, int64_t count, float* __restrict group) {
  if (s.low == nullptr) return widened(s.param, s.param_kind, at, count, group);
  const uint16_t* __restrict high = static_cast<const uint16_t*>(s.param) + at;
  const uint16_t* __restrict low = s.low + at;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) group[i] = joined(high[i], low[i]);
  return group;
}

inline void halved(const float* __restrict from, const Streams& s, int64_t at, int64_t count) {
  uint16_t* __restrict high = static_cast<uint16_t*>(s.param) + at;
  uint16_t* __restrict low = s.low + at;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    high[i] = upper_half(from[i]);
    low[i] = static_cast<uint16_t>(bits_of(from[i]));
  }
}

// New values [count] of memory that holds nothing yet. Stores bypass the cache where they can: a plain store would
// first read the line from memory.
inline void streamed(const float* __restrict from, float* __restrict to, int64_t count) {
#if defined(__x86_64__)
  typedef float Four __attribute__((vector_size(16)));
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0 && count % 4 == 0) {
    for (int64_t i = 0; i < count; i += 4) {
      const Four four = *reinterpret_cast<const Four*>(from + i);
#if defined(__clang__)
      __builtin_nontemporal_store(four, reinterpret_cast<Four*>(to + i));
#else
      __builtin_ia32_movntps(to + i, four);
#endif
    }
    return;
  }
#endif
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// The old values of `data` [count] from `at` on in fp32, in `group`, which the rule may write.
inline float* old_values(const void* data, Kind kind, int64_t at, int64_t count, float* __restrict group) {
  if (data == nullptr) return nullptr;
  if (kind != Kind::fp32) return widened(const_cast<void*>(data), kind, at, count, group);
  const float* __restrict from = static_cast<const float*>(data) + at;
  for (int64_t i = 0; i < count; ++i) group[i] = from[i];
  return group;
}

inline void stored(const float* from, void* data, Kind kind, int64_t at, int64_t count) {
  if (data == nullptr) return;
  if (kind == Kind::fp32) {
    streamed(from, static_cast<float*>(data) + at, count);
  } else {
    narrowed(from, data, kind, at, count);
  }
}

// -- stochastic rounding ------------------------------------------------------------------------------------

// The place in the rows of `Draws` that a pass has reached.
struct Cursor {
  int64_t row;
};

inline Cursor cursor_at(const Draws& draws, int64_t at) {
  int64_t low = 0, high = draws.num_rows;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    draws.rows[3 * middle] <= at ? low = middle : high = middle;
  }
  return {low};
}

// The elements from `at` on, up to `stop`, that have one key.
struct Run {
  int64_t stop;
  uint32_t key, index;  // index: of the element `at`
};

INLINE Run run_at(const Draws& draws, Cursor& cursor, int64_t at) {
  while (cursor.row + 1 < draws.num_rows && draws.rows[3 * (cursor.row + 1)] <= at) ++cursor.row;
  const int64_t* row = draws.rows + 3 * cursor.row;
  const int64_t stop = cursor.row + 1 < draws.num_rows ? row[3] : INT64_MAX;
  return {stop, key_of_step(row[2], draws.step), static_cast<uint32_t>(row[1] + at - row[0])};
}

// The random numbers of the elements [at, at + count), in `group`: one hash has those of two neighbours, the one of
// even index in its lower half.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "halves of words are read as memory");
inline void drawn(const Draws& draws, Cursor& cursor, int64_t at, int64_t count, uint16_t* __restrict group) {
  alignas(64) uint32_t pairs[GROUP / 2 + 1];
  for (int64_t done = 0; done < count;) {
    const Run run = run_at(draws, cursor, at + done);
    const int64_t stop = least(run.stop - at, count);
    const uint32_t key = run.key, index = run.index;
    const int64_t odd = index & 1, num_pairs = (odd + stop - done + 1) / 2;
    if (odd == 0 && stop - done == GROUP) {  // most: loops of constant length
#pragma GCC ivdep
      for (int64_t i = 0; i < GROUP / 2; ++i) pairs[i] = mixed((index / 2 + static_cast<uint32_t>(i)) ^ key);
      __builtin_memcpy(group, pairs, 2 * GROUP);
      return;
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < num_pairs; ++i) pairs[i] = mixed((index / 2 + static_cast<uint32_t>(i)) ^ key);
    const int64_t num_bytes = 2 * (stop - done);
    __builtin_memcpy(group + done, reinterpret_cast<const char*>(pairs) + 2 * odd,
                     static_cast<uint64_t>(num_bytes));
    done = stop;
  }
}

inline void narrowed_by(const float* __restrict from, void* data, Kind kind, int64_t at, int64_t count,
                        const uint16_t* __restrict draws) {
  uint16_t* __restrict to = static_cast<uint16_t*>(data) + at;
  if (kind == Kind::bf16) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16_by(from[i], draws[i]);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) to[i] = to_fp16_by(from[i], draws[i]);
  }
}

// -- one pass -----------------------------------------------------------------------------------------------

// Store values of 16 bits, rounded by `draws`, or to nearest.
INLINE void put_narrow(const float* values, void* state, Kind kind, int64_t at, int64_t count,
                      const uint16_t* draws) {
  draws != nullptr ? narrowed_by(values, state, kind, at, count, draws) : narrowed(values, state, kind, at, count);
}

// Store a `param` that is narrower than fp32, or whose old values are in other memory (IS_OTHER), and `out`.
template <bool IS_OTHER>
INLINE void put_param(const Streams& s, int64_t at, int64_t count, const float* param, const uint16_t* draws) {
  if (s.low != nullptr) {
    halved(param, s, at, count);
  } else if (s.param_kind != Kind::fp32) {
    put_narrow(param, s.param, s.param_kind, at, count, draws);
  } else if (IS_OTHER) {
    stored(param, s.param, Kind::fp32, at, count);
  }
  narrowed(param, s.out, s.out_kind, at, count);
}

// The same, and the states.
template <bool IS_OTHER>
INLINE void put_group(const Streams& s, Cursor& cursor, int64_t at, int64_t count, const float* param,
                      const float* m, const float* v) {
  const bool is_narrow = s.param_kind != Kind::fp32, narrow_states = s.state_kind != Kind::fp32;
  alignas(64) uint16_t draws[GROUP];
  const bool by_draws = s.draws.rows != nullptr && (is_narrow || narrow_states);
  if (by_draws) drawn(s.draws, cursor, at, count, draws);
  put_param<IS_OTHER>(s, at, count, param, by_draws ? draws : nullptr);
  if (narrow_states) {
    const bool has_two = s.states[1] != nullptr;
    put_narrow(m, s.states[0], s.state_kind, at, count, by_draws && !has_two ? draws : nullptr);
    if (has_two) put_narrow(v, s.states[1], s.state_kind, at, count, by_draws ? draws : nullptr);
  } else if (IS_OTHER) {
    stored(m, s.states[0], Kind::fp32, at, count);
    stored(v, s.states[1], Kind::fp32, at, count);
  }
}

template <class Rule>
INLINE void one_group(const Streams& s, Cursor& cursor, int64_t at, int64_t count, const Rule& rule) {
  alignas(64) float grads[GROUP], first[GROUP], second[GROUP], params[GROUP];
  float* param = params_of(s, at, count, params);
  if (s.takes_edits) edits_taken(param, s.out, s.out_kind, at, count);
  const float* grad = widened(const_cast<void*>(s.grad), s.grad_kind, at, count, grads);
  float* m = widened(s.states[0], s.state_kind, at, count, first);
  float* v = widened(s.states[1], s.state_kind, at, count, second);
  rule(at, count, param, grad, m, v);
  put_group<false>(s, cursor, at, count, param, m, v);
}

// The same where the old values are in other memory, which is only read.
template <class Rule>
INLINE void one_group_apart(const Streams& s, Cursor& cursor, int64_t at, int64_t count, const Rule& rule) {
  alignas(64) float grads[GROUP], first[GROUP], second[GROUP], param[GROUP];
  old_values(s.old_param, s.param_kind, at, count, param);
  if (s.takes_edits) edits_taken(param, s.out, s.out_kind, at, count);
  const float* grad = widened(const_cast<void*>(s.grad), s.grad_kind, at, count, grads);
  float* m = old_values(s.old_states[0], s.state_kind, at, count, first);
  float* v = old_values(s.old_states[1], s.state_kind, at, count, second);
  rule(at, count, param, grad, m, v);
  put_group<true>(s, cursor, at, count, param, m, v);
}

template <class Rule>
void pass_apart(const Streams& s, int64_t begin, int64_t end, const Rule& rule) {
  int64_t at = begin;
  Cursor cursor = cursor_at(s.draws, begin);
  for (; at + GROUP <= end; at += GROUP) {
    fetch(s.old_param, s.param_kind, at + AHEAD, GROUP, false);
    fetch(s.old_states[0], s.state_kind, at + AHEAD, GROUP, false);
    fetch(s.old_states[1], s.state_kind, at + AHEAD, GROUP, false);
    fetch(s.grad, s.grad_kind, at + AHEAD, GROUP, false);
    fetch(s.out, s.out_kind, at + AHEAD, GROUP, true);
    one_group_apart(s, cursor, at, GROUP, rule);
  }
  for (; at < end; ++at) one_group_apart(s, cursor, at, 1, rule);
#if defined(__x86_64__)
  __builtin_ia32_sfence();  // stores that bypass the cache are seen by other threads afterwards
#endif
}

// -- one pass over states of 8 bits ---------------------------------------------------------------------------

INLINE const uint8_t* row_at(const void* rows, int64_t at) {
  return static_cast<const uint8_t*>(rows) + at / ROW_NUMEL * ROW_BYTES;
}

template <bool IS_OTHER, bool BY_DRAWS, class Rule>
INLINE void one_row(const Streams& s, Cursor& cursor, int64_t at, const Rule& rule) {
  alignas(64) float means[ROW_NUMEL], squares[ROW_NUMEL], params[GROUP], grads[GROUP];
  alignas(64) uint16_t draws[ROW_NUMEL];
  const void* const* rows = IS_OTHER ? s.old_states : s.states;
  decode_means(row_at(rows[0], at), means);
  const bool has_two = rows[1] != nullptr;
  if (has_two) decode_squares(row_at(rows[1], at), squares);
  for (int64_t i = 0; i < ROW_NUMEL; i += GROUP) {
    if (BY_DRAWS) drawn(s.draws, cursor, at + i, GROUP, draws + i);
    float* param = IS_OTHER ? old_values(s.old_param, s.param_kind, at + i, GROUP, params)
                            : params_of(s, at + i, GROUP, params);
    if (s.takes_edits) edits_taken(param, s.out, s.out_kind, at + i, GROUP);
    const float* grad = widened(const_cast<void*>(s.grad), s.grad_kind, at + i, GROUP, grads);
    rule(at + i, GROUP, param, grad, means + i, squares + i);
    put_param<IS_OTHER>(s, at + i, GROUP, param, BY_DRAWS ? draws + i : nullptr);
  }
  encode_row<MEAN_LEVELS, BY_DRAWS>(means, draws, const_cast<uint8_t*>(row_at(s.states[0], at)));
  if (!has_two) return;
  encode_row<SQUARE_LEVELS, BY_DRAWS>(squares, draws, const_cast<uint8_t*>(row_at(s.states[1], at)));
}

template <bool IS_OTHER, bool BY_DRAWS, class Rule>
INLINE void rows_in(const Streams& s, int64_t begin, int64_t end, const Rule& rule) {
  Cursor cursor = cursor_at(s.draws, begin);
  for (int64_t at = begin; at < end; at += ROW_NUMEL) {
    fetch(IS_OTHER ? s.old_param : s.param, s.param_kind, at + AHEAD, ROW_NUMEL, !IS_OTHER);
    fetch(s.low, Kind::bf16, at + AHEAD, ROW_NUMEL, true);
    fetch(s.grad, s.grad_kind, at + AHEAD, ROW_NUMEL, false);
    fetch(s.out, s.out_kind, at + AHEAD, ROW_NUMEL, true);
    one_row<IS_OTHER, BY_DRAWS>(s, cursor, at, rule);
  }
}

// As `pass`, where states have 8 bits. begin: the start of a row.
template <class Rule>
void pass_rows(const Streams& s, int64_t begin, int64_t end, const Rule& rule) {
  if (s.old_param == nullptr) {
    return s.draws.rows == nullptr ? rows_in<false, false>(s, begin, end, rule)
                                   : rows_in<false, true>(s, begin, end, rule);
  }
  s.draws.rows == nullptr ? rows_in<true, false>(s, begin, end, rule)
                          : rows_in<true, true>(s, begin, end, rule);
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// One pass: load, `rule`, store. A rule works on fp32 [count]: (at, count, param, grad, state, other state).
template <class Rule>
void pass(const Streams& s, int64_t begin, int64_t end, const Rule& rule) {
  if (s.old_param != nullptr) return pass_apart(s, begin, end, rule);
  int64_t at = begin;
  Cursor cursor = cursor_at(s.draws, begin);
  for (; at + GROUP <= end; at += GROUP) {
    fetch(s.param, s.param_kind, at + AHEAD, GROUP, true);
    fetch(s.low, Kind::bf16, at + AHEAD, GROUP, true);
    fetch(s.grad, s.grad_kind, at + AHEAD, GROUP, false);
    fetch(s.states[0], s.state_kind, at + AHEAD, GROUP, true);
    fetch(s.states[1], s.state_kind, at + AHEAD, GROUP, true);
    fetch(s.out, s.out_kind, at + AHEAD, GROUP, true);
    one_group(s, cursor, at, GROUP, rule);
  }
  for (; at < end; ++at) one_group(s, cursor, at, 1, rule);  // a loop with a variable count would double the code
}

// -- one pass over words of two bf16 ----------------------------------------------------------------------------

// Two neighbours are the halves of a word, as their random numbers are. So nothing is shuffled between lanes, which
// would take as long as the update itself.
typedef uint32_t Word __attribute__((may_alias, aligned(2)));

INLINE bool has_words(const Streams& s) {
  return s.param_kind == Kind::bf16 && s.grad_kind == Kind::bf16 && s.state_kind == Kind::bf16 &&
         s.out == nullptr && s.low == nullptr && s.old_param == nullptr && s.draws.rows != nullptr;
}

INLINE uint32_t word_of(uint16_t even, uint16_t odd) { return even | uint32_t{odd} << 16; }

// One group, whose first element has an even index. rule: of one element (param, grad, state, other state).
template <class Rule>
INLINE void one_group_of_words(const Streams& s, const Run& run, int64_t at, const Rule& rule) {
  Word* __restrict params = reinterpret_cast<Word*>(static_cast<uint16_t*>(s.param) + at);
  const Word* __restrict grads = reinterpret_cast<const Word*>(static_cast<const uint16_t*>(s.grad) + at);
  Word* __restrict first = reinterpret_cast<Word*>(static_cast<uint16_t*>(s.states[0]) + at);
  Word* __restrict second = reinterpret_cast<Word*>(static_cast<uint16_t*>(s.states[1]) + at);
#pragma GCC ivdep
  for (int64_t i = 0; i < GROUP / 2; ++i) {
    float p[] = {float_of(params[i] << 16), float_of(params[i] & 0xffff0000)};
    float m[] = {float_of(first[i] << 16), float_of(first[i] & 0xffff0000)};
    float v[] = {float_of(second[i] << 16), float_of(second[i] & 0xffff0000)};
    rule(p[0], float_of(grads[i] << 16), m[0], v[0]);
    rule(p[1], float_of(grads[i] & 0xffff0000), m[1], v[1]);
    const uint32_t draws = mixed((run.index / 2 + static_cast<uint32_t>(i)) ^ run.key);
    params[i] = word_of(to_bf16_by(p[0], draws & 0xffff), to_bf16_by(p[1], draws >> 16));
    first[i] = word_of(to_bf16(m[0]), to_bf16(m[1]));
    second[i] = word_of(to_bf16_by(v[0], draws & 0xffff), to_bf16_by(v[1], draws >> 16));
  }
}

// As `pass`, for streams that `has_words` accepts. whole: the rule of other groups, as in `pass`.
template <class Rule, class Whole>
INLINE void pass_words(const Streams& s, int64_t begin, int64_t end, const Rule& rule, const Whole& whole) {
  int64_t at = begin;
  Cursor cursor = cursor_at(s.draws, begin);
  for (; at + GROUP <= end; at += GROUP) {
    fetch(s.param, Kind::bf16, at + AHEAD, GROUP, true);
    fetch(s.grad, Kind::bf16, at + AHEAD, GROUP, false);
    fetch(s.states[0], Kind::bf16, at + AHEAD, GROUP, true);
    fetch(s.states[1], Kind::bf16, at + AHEAD, GROUP, true);
    const Run run = run_at(s.draws, cursor, at);
    if (run.stop >= at + GROUP && run.index % 2 == 0) {
      one_group_of_words(s, run, at, rule);
    } else {
      one_group(s, cursor, at, GROUP, whole);
    }
  }
  for (; at < end; ++at) one_group(s, cursor, at, 1, whole);
}

// -- rules ----------------------------------------------------------------------------------------------------

// A mean changes by (new - mean) * (1 - beta), and decay is subtracted together with the update: fp32 represents
// 0.999 and 1 - 1e-5 only to 3e-8, and multiplying by them a thousand times would make this error 3e-5.
inline float moved(float mean, float value, float gain) { return mean + (value - mean) * gain; }

// The same for squares. A square that overflowed stays inf, and its element stops; inf - inf would be nan.
inline float moved_square(float square, float g, float gain) {
  const float next = moved(square, g * g, gain);
  return square < __builtin_inff() ? next : square;
}

template <bool DECOUPLED>
INLINE void adam_element(const Adam& a, float& p, float grad, float& m, float& v) {
  float g = grad * a.scale;
  if (!DECOUPLED) g = g + p * a.decay;
  const float mean = moved(m, g, a.gain1);
  const float square = moved_square(v, g, a.gain2);
  const float change = (mean * a.rate) / (__builtin_sqrtf(square) * a.root + a.eps);
  m = mean;
  v = square;
  p = p - (DECOUPLED ? change + p * a.decay : change);
}

template <bool DECOUPLED>
INLINE void adam_group(const Adam& a, int64_t count, float* __restrict p, const float* __restrict grad,
                       float* __restrict m, float* __restrict v) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) adam_element<DECOUPLED>(a, p[i], grad[i], m[i], v[i]);
}

void adam(const Streams& s, const Adam& a, int64_t begin, int64_t end) {
  const auto rule = [&](int64_t, int64_t count, float* p, const float* g, float* m, float* v) {
    a.decoupled ? adam_group<true>(a, count, p, g, m, v) : adam_group<false>(a, count, p, g, m, v);
  };
  if (has_words(s)) {
    const auto one = [&](float& p, float g, float& m, float& v) { adam_element<true>(a, p, g, m, v); };
    const auto coupled = [&](float& p, float g, float& m, float& v) { adam_element<false>(a, p, g, m, v); };
    return a.decoupled ? pass_words(s, begin, end, one, rule) : pass_words(s, begin, end, coupled, rule);
  }
  s.state_kind == Kind::rows ? pass_rows(s, begin, end, rule) : pass(s, begin, end, rule);
}

template <bool IS_MOMENTUM>
INLINE void frozen_adam_group(const FrozenAdam& a, int64_t count, float* __restrict p,
                              const float* __restrict grad, float* __restrict m, const float* __restrict v) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale;
    const float mean = IS_MOMENTUM ? g : moved(m[i], g, a.gain1);
    const float full = (mean * a.rate) / (__builtin_sqrtf(v[i]) * a.root + a.eps);
    const float below = full > a.limit ? a.limit : full;
    const float change = (below < -a.limit ? -a.limit : below) + p[i] * a.decay;
    m[i] = mean;
    p[i] = v[i] > 0.0f ? p[i] - change : p[i];
  }
}

void frozen_adam(const Streams& s, const FrozenAdam& a, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t, int64_t count, float* p, const float* g, float* m, float* v) {
    a.gain1 == 1.0f ? frozen_adam_group<true>(a, count, p, g, m, v)
                    : frozen_adam_group<false>(a, count, p, g, m, v);
  });
}

INLINE void lion_group(const Lion& a, int64_t count, float* __restrict p, const float* __restrict grad,
                       float* __restrict m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale;
    const float way = moved(m[i], g, a.gain1);
    const float sign = static_cast<float>((way > 0.0f) - (way < 0.0f));  // two ternaries would be branches
    const float change = (way == way ? sign : way) * a.rate;
    p[i] = p[i] - (change + p[i] * a.decay);
    m[i] = moved(m[i], g, a.gain2);
  }
}

void lion(const Streams& s, const Lion& a, int64_t begin, int64_t end) {
  const auto rule = [&](int64_t, int64_t count, float* p, const float* g, float* m, float*) {
    lion_group(a, count, p, g, m);
  };
  s.state_kind == Kind::rows ? pass_rows(s, begin, end, rule) : pass(s, begin, end, rule);
}

INLINE void adagrad_group(const Adagrad& a, int64_t count, float* __restrict p, const float* __restrict grad,
                          float* __restrict sum) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale + p[i] * a.decay;
    const float total = sum[i] + g * g;
    sum[i] = total;
    p[i] = p[i] - (g * a.rate) / (__builtin_sqrtf(total) + a.eps);
  }
}

void adagrad(const Streams& s, const Adagrad& a, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t, int64_t count, float* p, const float* g, float* sum, float*) {
    adagrad_group(a, count, p, g, sum);
  });
}

INLINE void sgd_plain(const Sgd& a, int64_t count, float* __restrict p, const float* __restrict grad) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    p[i] = p[i] - (grad[i] * a.scale + p[i] * a.decay) * a.rate;
  }
}

template <bool NESTEROV>
INLINE void sgd_momentum(const Sgd& a, int64_t count, float* __restrict p, const float* __restrict grad,
                         float* __restrict buffer) {
#pragma GCC ivdep
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
INLINE void lamb_group(const Lamb& a, int64_t count, const float* __restrict p, const float* grad,
                       float* __restrict m, float* __restrict v, float* direction) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * a.scale;
    const float mean = moved(m[i], g, a.gain1);
    const float square = moved_square(v[i], g, a.gain2);
    m[i] = mean;
    v[i] = square;
    direction[i] = (mean * a.first) / (__builtin_sqrtf(square) * a.root + a.eps) + p[i] * a.decay;
  }
}

void lamb_direction(const Streams& s, const Lamb& a, float* direction, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t at, int64_t count, float* p, const float* g, float* m, float* v) {
    lamb_group(a, count, p, g, m, v, direction + at);
  });
}

INLINE void step_group(int64_t count, float* __restrict p, const float* __restrict direction, float rate) {
  for (int64_t i = 0; i < count; ++i) p[i] = p[i] - direction[i] * rate;
}

void lamb_apply(const Streams& s, const float* direction, float rate, int64_t begin, int64_t end) {
  pass(s, begin, end, [&](int64_t at, int64_t count, float* p, const float*, float*, float*) {
    step_group(count, p, direction + at, rate);
  });
}

// -- sums -------------------------------------------------------------------------------------------------

// A tile's squares are added in fp32, element i to lane i mod 64, at most TILE / 64 of them to one lane. The
// lanes are then added in fp64. The order is the same for every vector width.
constexpr int64_t TILE = 1024;
constexpr int64_t WIDTH = 16;
typedef float Floats __attribute__((vector_size(64), aligned(4)));

void add_squares(double* __restrict sums, const float* data, int64_t count) {
  Floats a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * WIDTH <= count; i += 4 * WIDTH) {
    const Floats* here = reinterpret_cast<const Floats*>(data + i);
    a = a + here[0] * here[0];
    b = b + here[1] * here[1];
    c = c + here[2] * here[2];
    d = d + here[3] * here[3];
  }
  a = (a + b) + (c + d);
  for (int64_t lane = 0; lane < WIDTH; ++lane) sums[lane] += double{a[lane]};
  for (; i < count; ++i) sums[i % WIDTH] += double{data[i]} * double{data[i]};
}

double square_sum(const void* data, Kind kind, int64_t begin, int64_t end) {
  double sums[WIDTH] = {};
  alignas(64) float tile[TILE];
  for (int64_t at = begin; at < end; at += TILE) {
    const int64_t count = least(TILE, end - at);
    fetch(data, kind, at + TILE, TILE, false);
    add_squares(sums, widened(const_cast<void*>(data), kind, at, count, tile), count);
  }
  double total = 0.0;
  for (int64_t lane = 0; lane < WIDTH; ++lane) total = total + sums[lane];
  return total;
}

}  // namespace

const Kernels kernels = {adam, frozen_adam, lion, adagrad, sgd, lamb_direction, lamb_apply, square_sum};

}  // namespace XDS_ISA
}  // namespace xds
