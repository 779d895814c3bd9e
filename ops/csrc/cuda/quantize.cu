// quantize_ and dequantize_ on CUDA: see ops/kernels/quantize.py for the definition, block_formulas.h for one
// element and blocks.cuh for the assignment of elements to threads.
#include "blocks.cuh"

namespace xds {

template <class T>
struct Quantize {
  const T* flat;
  uint8_t* values;
  float* absmax;
  float* error;
  int64_t numel;
  Blocks blocks;
  bool takes_packs;
};

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads, kWide<T> == 4 ? 2 : 3) quantize_kernel(const Quantize<T> on) {
  constexpr int kBytes = kWide<T> * kBits / 8;
  for_tiles<T>(on.numel, on.takes_packs, [&on](const Here& here) {
    float rows[kRows<T>][kWide<T>];
    load_rows<T>(on.flat, here, on.numel, rows);
    if (on.error != nullptr) {
      float errors[kRows<T>][kWide<T>];
      load_rows<T>(on.error, here, on.numel, errors);
#pragma unroll
      for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
        for (int i = 0; i < kWide<T>; ++i) rows[row][i] = plus(rows[row][i], errors[row][i]);
    }
    uint32_t largest[kRows<T>] = {};
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i)
        largest[row] = max(largest[row], magnitude_of(rows[row][i]));
    reduce<T>(on.blocks, largest, [](uint32_t a, uint32_t b) { return max(a, b); });
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row) {
      const int64_t at = here.at + row * kRowStep<T>;
      const Magnitude block = magnitude<kBits>(largest[row]);
      if (leads<T>(on.blocks, here, row) && at < on.numel)
        on.absmax[at >> on.blocks.shift] = block.absmax;
      float whole[kWide<T>];
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i) whole[i] = rounded(rows[row][i], block);
      const int64_t left = ((on.numel - at) * kBits + 7) / 8;
      store_word<kBytes>(on.values + at * kBits / 8, left, here.whole, packed<kBits>(whole));
      if (on.error == nullptr || !block.is_finite) continue;
      float lost[kWide<T>];
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i)
        lost[i] = plus(rows[row][i], -restored<kBits>(plus(whole[i], -kMagic), block.absmax));
      store_row(on.error, at, here.whole, on.numel, lost);
    }
  });
}

template <class T>
struct Dequantize {
  const uint8_t* values;
  const float* absmax;
  T* out;
  int64_t numel;
  int64_t parts;
  int64_t part_bytes;
  int64_t part_blocks;
  int shift;
  float factor;
  bool takes_packs;
};

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads, kWide<T> == 4 ? 2 : 3) dequantize_kernel(const Dequantize<T> on) {
  constexpr int kBytes = kWide<T> * kBits / 8;
  for_tiles<T>(on.numel, on.takes_packs, [&on](const Here& here) {
    float total[kRows<T>][kWide<T>] = {};
    const uint8_t* values = on.values;
    const float* absmax = on.absmax;
    for (int64_t part = 0; part < on.parts; ++part) {
      uint64_t words[kRows<T>];
      float magnitudes[kRows<T>];
#pragma unroll
      for (int row = 0; row < kRows<T>; ++row) {
        const int64_t at = here.at + row * kRowStep<T>;
        const int64_t left = ((on.numel - at) * kBits + 7) / 8;
        words[row] = load_word<kBytes>(values + at * kBits / 8, left, here.whole);
        magnitudes[row] = at < on.numel ? absmax[at >> on.shift] : 0.0f;
      }
#pragma unroll
      for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
        for (int i = 0; i < kWide<T>; ++i)
          total[row][i] = plus(
              total[row][i], restored<kBits>(unpacked<kBits>(words[row], i), magnitudes[row]));
      values += on.part_bytes;
      absmax += on.part_blocks;
    }
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row) {
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i) total[row][i] = times(total[row][i], on.factor);
      store_row(on.out, here.at + row * kRowStep<T>, here.whole, on.numel, total[row]);
    }
  });
}

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

template <class Body>
void with_bits(int64_t bits, Body&& body) {
  if (bits == 8) return body(Number<8>{});
  return body(Number<4>{});
}

void quantize_(
    Tensor flat, Tensor values, Tensor absmax, MaybeTensor error, int64_t bits, int64_t block_numel) {
  const Checks check("quantize_", "flat", flat);
  check.flat(flat, "flat", kFloats);
  check.flat(error, "error", kFloat);
  check.on_device(values, "values", {ScalarType::Byte});
  check.on_device(absmax, "absmax", kFloat);
  check.that(bits == 8 || bits == 4, "bits needs to be 8 or 4");
  check.that(is_block(block_numel), "block_numel needs to be 32, 64, 128, 256, 512 or 1024");
  const int64_t numel = flat.numel();
  check.that(values.numel() == divide_up(numel * bits, 8), "values needs n * bits / 8 bytes, rounded up");
  check.that(absmax.numel() == divide_up(numel, block_numel), "absmax needs one element a block");
  if (numel == 0) return;
  const Place place(flat);
  with_float_type(flat.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Quantize<T> on = {
        static_cast<const T*>(flat.const_data_ptr()),
        static_cast<uint8_t*>(values.mutable_data_ptr()),
        static_cast<float*>(absmax.mutable_data_ptr()),
        error.has_value() ? static_cast<float*>(error->mutable_data_ptr()) : nullptr,
        numel,
        blocks_of<T>(block_numel),
        false};
    on.takes_packs = is_aligned(on.flat, 16) && is_aligned(on.error, 16) && is_aligned(on.values, 8);
    with_bits(bits, [&](auto bits_tag) {
      place.launch_over<&quantize_kernel<T, decltype(bits_tag)::value>>(work_of(numel), on);
    });
  });
}

void dequantize_(
    Tensor values, Tensor absmax, Tensor out, int64_t bits, int64_t block_numel, double factor) {
  const Checks check("dequantize_", "out", out);
  check.flat(out, "out", kFloats);
  check.on_device(values, "values", {ScalarType::Byte});
  check.on_device(absmax, "absmax", kFloat);
  check.that(bits == 8 || bits == 4, "bits needs to be 8 or 4");
  check.that(is_block(block_numel), "block_numel needs to be 32, 64, 128, 256, 512 or 1024");
  const int64_t numel = out.numel();
  const int64_t part_bytes = divide_up(numel * bits, 8);
  const int64_t part_blocks = divide_up(numel, block_numel);
  check.that(
      values.dim() == 2 && values.size(1) == part_bytes, "values needs to be [parts, n * bits / 8]");
  check.that(
      absmax.dim() == 2 && absmax.size(0) == values.size(0) && absmax.size(1) == part_blocks,
      "absmax needs to be [parts, blocks]");
  if (numel == 0) return;
  const Place place(out);
  with_float_type(out.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Dequantize<T> on = {
        static_cast<const uint8_t*>(values.const_data_ptr()),
        static_cast<const float*>(absmax.const_data_ptr()),
        static_cast<T*>(out.mutable_data_ptr()),
        numel,
        values.size(0),
        part_bytes,
        part_blocks,
        log2_of(block_numel),
        static_cast<float>(factor),
        false};
    const bool fits = on.parts == 1 || part_bytes % 8 == 0;
    on.takes_packs = fits && is_aligned(on.out, 16) && is_aligned(on.values, 8);
    with_bits(bits, [&](auto bits_tag) {
      place.launch_over<&dequantize_kernel<T, decltype(bits_tag)::value>>(work_of(numel), on);
    });
  });
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) {
  m.impl("quantize_", TORCH_BOX(&xds::quantize_));
  m.impl("dequantize_", TORCH_BOX(&xds::dequantize_));
}
