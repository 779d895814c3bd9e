// sign_pack_ and sign_unpack_ on CUDA: see ops/kernels/signs.py for the definition, block_formulas.h for one
// element and blocks.cuh for the assignment of elements to threads.
//
// A lane packs the 8 neighbours it loaded into one byte (of fp32 it has 4, and takes the next lane's half). A
// ballot would gather one bit of each lane, and these are neighbours only with loads of 4 bytes.
#include "blocks.cuh"

namespace xds {

constexpr int64_t kMaxPartials = 4096;  // of the total sum, on every device: its order depends on n only

template <class T>
struct SignPack {
  const T* value;
  float* error;
  uint8_t* signs;
  float* scales;
  double* partials;  // null where every block has a scale
  int partial_count;
  int64_t numel;
  Blocks blocks;
  bool root_mean_square;
  float gain;
  bool takes_packs;
};

template <class T>
__device__ inline void load_buffer(
    const SignPack<T>& on, const Here& here, float (&rows)[kRows<T>][kWide<T>]) {
  float errors[kRows<T>][kWide<T>];
  load_rows<T>(on.value, here, on.numel, rows);
  load_rows<T>(on.error, here, on.numel, errors);
#pragma unroll
  for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
    for (int i = 0; i < kWide<T>; ++i) rows[row][i] = plus(rows[row][i], errors[row][i]);
}

// A row's signs: all lanes call it.
template <class T>
__device__ inline void store_signs(const SignPack<T>& on, int64_t at, int lane, uint32_t bits) {
  const int64_t left = on.numel - at;
  if (left < kWide<T>) bits &= left > 0 ? (1u << left) - 1 : 0u;
  if constexpr (kWide<T> == 4) {
    bits |= __shfl_down_sync(0xffffffffu, bits, 1) << 4;
    if (lane % 2 != 0) return;
  }
  if (left > 0) on.signs[at / 8] = static_cast<uint8_t>(bits);
}

// The scales of this lane's rows: those of the blocks, or the common scale where there is one.
template <class T>
__device__ inline void find_scales(
    const SignPack<T>& on, const Here& here, const float (&rows)[kRows<T>][kWide<T>],
    float (&scales)[kRows<T>]) {
  if (on.partials != nullptr) {
    const float scale = *on.scales;
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row) scales[row] = scale;
    return;
  }
  double sums[kRows<T>] = {};
#pragma unroll
  for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
    for (int i = 0; i < kWide<T>; ++i) sums[row] += size_of(rows[row][i], on.root_mean_square);
  reduce<T>(on.blocks, sums, [](double a, double b) { return a + b; });
#pragma unroll
  for (int row = 0; row < kRows<T>; ++row) {
    const int64_t block = (here.at + row * kRowStep<T>) >> on.blocks.shift;
    const int64_t left = on.numel - (block << on.blocks.shift);
    const int64_t count = left < on.blocks.numel ? left : on.blocks.numel;
    scales[row] = scale_of(sums[row], count, on.root_mean_square, on.gain);
    if (leads<T>(on.blocks, here, row) && left > 0) on.scales[block] = scales[row];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) sign_pack_kernel(const SignPack<T> on) {
  for_tiles<T>(on.numel, on.takes_packs, [&on](const Here& here) {
    float rows[kRows<T>][kWide<T>], scales[kRows<T>];
    load_buffer<T>(on, here, rows);
    find_scales<T>(on, here, rows, scales);
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row) {
      const int64_t at = here.at + row * kRowStep<T>;
      const uint32_t bits = sign_bits(rows[row]);
      store_signs<T>(on, at, here.lane, bits);
      if (magnitude_of(scales[row]) >= kInfinity) continue;
      float lost[kWide<T>];
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i)
        lost[i] = plus(rows[row][i], -signed_scale(bits, i, scales[row]));
      store_row(on.error, at, here.whole, on.numel, lost);
    }
  });
}

// The sum over a block of threads, at thread 0.
__device__ inline double sum_of_threads(double sum) {
  __shared__ double of_warps[kThreads / 32];
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += of_warps[warp];
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) sign_partials_kernel(const SignPack<T> on) {
  double sum = 0;
  for_tiles<T>(on.numel, on.takes_packs, [&on, &sum](const Here& here) {
    float rows[kRows<T>][kWide<T>];
    load_buffer<T>(on, here, rows);
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i) sum += size_of(rows[row][i], on.root_mean_square);
  });
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) on.partials[blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) sign_scale_kernel(const SignPack<T> on) {
  double sum = 0;
  for (int i = threadIdx.x; i < on.partial_count; i += kThreads) sum += on.partials[i];
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) *on.scales = scale_of(sum, on.numel, on.root_mean_square, on.gain);
}

template <class T>
struct SignUnpack {
  const uint8_t* signs;
  const float* scales;
  T* out;
  int64_t numel;
  int64_t parts;
  int64_t part_bytes;
  int64_t part_scales;
  int shift;
  float factor;
  bool takes_packs;
};

template <class T>
__global__ void __launch_bounds__(kThreads, kWide<T> == 4 ? 2 : 3) sign_unpack_kernel(const SignUnpack<T> on) {
  for_tiles<T>(on.numel, on.takes_packs, [&on](const Here& here) {
    float total[kRows<T>][kWide<T>] = {};
    const uint8_t* signs = on.signs;
    const float* scales = on.scales;
    for (int64_t part = 0; part < on.parts; ++part) {
      uint32_t bits[kRows<T>];
      float scale[kRows<T>];
#pragma unroll
      for (int row = 0; row < kRows<T>; ++row) {
        const int64_t at = here.at + row * kRowStep<T>;
        const bool is_inside = at < on.numel;
        bits[row] = is_inside ? signs[at / 8] >> (at % 8) : 0u;
        scale[row] = is_inside ? scales[at >> on.shift] : 0.0f;
      }
#pragma unroll
      for (int row = 0; row < kRows<T>; ++row)
#pragma unroll
        for (int i = 0; i < kWide<T>; ++i)
          total[row][i] = plus(total[row][i], signed_scale(bits[row], i, scale[row]));
      signs += on.part_bytes;
      scales += on.part_scales;
    }
#pragma unroll
    for (int row = 0; row < kRows<T>; ++row) {
#pragma unroll
      for (int i = 0; i < kWide<T>; ++i) total[row][i] = times(total[row][i], on.factor);
      store_row(on.out, here.at + row * kRowStep<T>, here.whole, on.numel, total[row]);
    }
  });
}

constexpr const char* kBlockNeed = "block_numel needs to be 0, 32, 64, 128, 256, 512 or 1024";

inline int64_t scale_count(int64_t numel, int64_t block_numel) {
  return block_numel == 0 ? 1 : divide_up(numel, block_numel);
}

// Outside of the generic lambda that uses it: there nvcc drops a brace of the list.
inline Tensor doubles(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {count}, ScalarType::Double);
}

void sign_pack_(
    Tensor value, Tensor error, Tensor signs, Tensor scales, int64_t block_numel, bool root_mean_square,
    double gain) {
  const Checks check("sign_pack_", "value", value);
  check.flat(value, "value", kFloats);
  check.flat(error, "error", kFloat);
  check.on_device(signs, "signs", {ScalarType::Byte});
  check.on_device(scales, "scales", kFloat);
  check.that(block_numel == 0 || is_block(block_numel), kBlockNeed);
  const int64_t numel = value.numel();
  check.that(signs.numel() == divide_up(numel, 8), "signs needs n / 8 bytes, rounded up");
  check.that(scales.numel() == scale_count(numel, block_numel), "scales needs one element a block");
  const Place place(value);
  if (numel == 0) {
    if (block_numel == 0) torch::stable::zero_(scales);
    return;
  }
  with_float_type(value.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    SignPack<T> on = {
        static_cast<const T*>(value.const_data_ptr()),
        static_cast<float*>(error.mutable_data_ptr()),
        static_cast<uint8_t*>(signs.mutable_data_ptr()),
        static_cast<float*>(scales.mutable_data_ptr()),
        nullptr,
        0,
        numel,
        blocks_of<T>(block_numel == 0 ? kTile : block_numel),
        root_mean_square,
        static_cast<float>(gain),
        false};
    on.takes_packs = is_aligned(on.value, 16) && is_aligned(on.error, 16);
    std::optional<Tensor> partials;
    if (block_numel == 0) {
      on.partial_count = static_cast<int>(
          std::min(kMaxPartials, work_of(numel)));
      partials = doubles(value, on.partial_count);
      on.partials = static_cast<double*>(partials->mutable_data_ptr());
      place.launch(&sign_partials_kernel<T>, on.partial_count, on);
      place.launch(&sign_scale_kernel<T>, 1, on);
    }
    place.launch_over<&sign_pack_kernel<T>>(work_of(numel), on);
  });
}

void sign_unpack_(Tensor signs, Tensor scales, Tensor out, int64_t block_numel, double factor) {
  const Checks check("sign_unpack_", "out", out);
  check.flat(out, "out", kFloats);
  check.on_device(signs, "signs", {ScalarType::Byte});
  check.on_device(scales, "scales", kFloat);
  check.that(block_numel == 0 || is_block(block_numel), kBlockNeed);
  const int64_t numel = out.numel();
  const int64_t part_scales = scale_count(numel, block_numel);
  check.that(
      signs.dim() == 2 && signs.size(1) == divide_up(numel, 8), "signs needs to be [parts, n / 8]");
  check.that(
      scales.dim() == 2 && scales.size(0) == signs.size(0) && scales.size(1) == part_scales,
      "scales needs to be [parts, blocks]");
  if (numel == 0) return;
  const Place place(out);
  with_float_type(out.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    SignUnpack<T> on = {
        static_cast<const uint8_t*>(signs.const_data_ptr()),
        static_cast<const float*>(scales.const_data_ptr()),
        static_cast<T*>(out.mutable_data_ptr()),
        numel,
        signs.size(0),
        signs.size(1),
        part_scales,
        block_numel == 0 ? 62 : log2_of(block_numel),
        static_cast<float>(factor),
        false};
    on.takes_packs = is_aligned(on.out, 16);
    place.launch_over<&sign_unpack_kernel<T>>(work_of(numel), on);
  });
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) {
  m.impl("sign_pack_", TORCH_BOX(&xds::sign_pack_));
  m.impl("sign_unpack_", TORCH_BOX(&xds::sign_unpack_));
}
