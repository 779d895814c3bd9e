// The layout of blocks in a warp: a tile of 1,024 elements, 32 per lane, with all loads first.
//
//   row      lane 0 | lane 1 | ... | lane 31     a lane: 16 bytes, 8 neighbours of bf16 and fp16, 4 of fp32
//   tile     4 rows, of fp32 8
//   block    fits in a row: a group of lanes; longer: all lanes, and 2, 4 or 8 rows are combined
//
// So a block's maximum or sum needs only shuffles, and all elements are read once and stay in registers: a
// thread has 64 or 128 bytes of each tensor in flight. The block size is a run-time value.
#pragma once

#include "block_formulas.h"
#include "common.cuh"

namespace xds {

constexpr int64_t kTile = 1024;

template <class T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

template <class T>
constexpr int kRows = 32 / kWide<T>;

template <class T>
constexpr int kRowStep = 32 * kWide<T>;  // elements

// The start of lane `lane` in the warp's tile, and whether the tile may be read and written as packs.
struct Here {
  int64_t at;
  int lane;
  bool whole;
};

// Each tile of this warp in turn; `body(here)` is called by all 32 lanes.
template <class T, class Body>
__device__ inline void for_tiles(int64_t numel, bool takes_packs, Body body) {
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t(gridDim.x) * (kThreads / 32) * kTile;
  int64_t base = (int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * kTile;
  for (; base < numel; base += step) {
    const bool whole = takes_packs && base + kTile <= numel;
    body(Here{base + lane * kWide<T>, lane, whole});
  }
}

// Read the tile's rows as fp32, with zeros after the end. `T` sets how many neighbours a lane has.
template <class T, class From>
__device__ inline void load_rows(
    const From* from, const Here& here, int64_t numel, float (&to)[kRows<T>][kWide<T>]) {
  if (here.whole) {
    constexpr int kPiece = kWide<T> < kWide<From> ? kWide<T> : kWide<From>;
    Pack<From, kPiece> pieces[kRows<T>][kWide<T> / kPiece];
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
      for (int p = 0; p < kWide<T> / kPiece; ++p)
        pieces[row][p] = load<kPiece>(from + here.at + row * kRowStep<T> + p * kPiece);
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i)
        to[row][i] = static_cast<float>(pieces[row][i / kPiece].at[i % kPiece]);
    return;
  }
#pragma unroll
  for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
    for (int i = 0; i < kWide<T>; ++i) {
      const int64_t at = here.at + row * kRowStep<T> + i;
      to[row][i] = at < numel ? static_cast<float>(from[at]) : 0.0f;
    }
}

// Write one row, up to the end.
template <class To, int kCount>
__device__ inline void store_row(
    To* to, int64_t at, bool whole, int64_t numel, const float (&values)[kCount]) {
  constexpr int kPiece = kCount < kWide<To> ? kCount : kWide<To>;
  if (whole) {
#pragma unroll
    for (int p = 0; p < kCount / kPiece; ++p) {
      Pack<To, kPiece> pack;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) pack.at[i] = static_cast<To>(values[p * kPiece + i]);
      store<kPiece>(to + at + p * kPiece, pack);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (at + i < numel) to[at + i] = static_cast<To>(values[i]);
}

// kBytes as one word, the first lowest; of a tile that is not whole, `left` of them at most.
template <int kBytes>
__device__ inline uint64_t load_word(const uint8_t* from, int64_t left, bool whole) {
  if (whole) {
    if constexpr (kBytes == 8) return *reinterpret_cast<const uint64_t*>(from);
    if constexpr (kBytes == 4) return *reinterpret_cast<const uint32_t*>(from);
    return *reinterpret_cast<const uint16_t*>(from);
  }
  uint64_t word = 0;
#pragma unroll
  for (int i = 0; i < kBytes; ++i)
    if (i < left) word |= static_cast<uint64_t>(from[i]) << (8 * i);
  return word;
}

template <int kBytes>
__device__ inline void store_word(uint8_t* to, int64_t left, bool whole, uint64_t word) {
  if (whole) {
    if constexpr (kBytes == 8) *reinterpret_cast<uint64_t*>(to) = word;
    if constexpr (kBytes == 4) *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(word);
    if constexpr (kBytes == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
    return;
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i)
    if (i < left) to[i] = static_cast<uint8_t>(word >> (8 * i));
}

// The block size, in the forms that the device uses.
struct Blocks {
  int64_t numel;
  int shift;   // element `at` is of block at >> shift
  int lanes;   // that share a block within a row
  int joined;  // rows that share a block
};

// The combination of all lanes and rows of each element's block, with a commutative `join`.
template <class T, class Value, class Join>
__device__ inline void reduce(const Blocks& blocks, Value (&of_rows)[kRows<T>], Join join) {
#pragma unroll
  for (int apart = 1; apart < kRows<T>; apart *= 2) {
    if (apart >= blocks.joined) break;
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row) {
      if (row & apart) continue;
      of_rows[row] = of_rows[row + apart] = join(of_rows[row], of_rows[row + apart]);
    }
  }
#pragma unroll 1
  for (int apart = blocks.lanes / 2; apart > 0; apart /= 2)
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row)  // inner loop: shuffles of several rows are in flight at once
      of_rows[row] = join(of_rows[row], __shfl_xor_sync(0xffffffffu, of_rows[row], apart));
}

// Whether this lane writes the result of its block.
template <class T>
__device__ inline bool leads(const Blocks& blocks, const Here& here, int row) {
  return (here.lane & (blocks.lanes - 1)) == 0 && (row & (blocks.joined - 1)) == 0;  // powers of two
}

// ---------------------------------------------------------------------------------------------- host

inline int log2_of(int64_t power) {
  int shift = 0;
  while ((int64_t(1) << shift) < power) ++shift;
  return shift;
}

inline bool is_block(int64_t numel) { return numel >= 32 && numel <= kTile && (numel & (numel - 1)) == 0; }

template <class T>
Blocks blocks_of(int64_t numel) {
  const int64_t row = kRowStep<T>;
  const int lanes = static_cast<int>(std::min<int64_t>(32, numel / kWide<T>));
  return {numel, log2_of(numel), lanes, static_cast<int>(std::max<int64_t>(1, numel / row))};
}

inline bool is_aligned(const void* address, int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

// Tiles for a block: each of its warps takes one at a time.
inline int64_t work_of(int64_t numel) { return divide_up(numel, kTile * (kThreads / 32)); }

}  // namespace xds
