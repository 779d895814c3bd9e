// Registers the CPU ops that pack elements with torch: checks arguments, and splits work over torch's threads.
//
// Results depend neither on the number of threads nor on the instruction set.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "arguments.h"
#include "blocks.h"

namespace xds {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t GRAIN = 1 << 15;  // minimum number of elements per thread
constexpr int64_t TILE = 1024;  // every block size divides it

#if defined(__x86_64__)
const BlockKernels& kernels() {
  return of_isa(baseline::block_kernels, avx2::block_kernels, avx512::block_kernels);
}
#else
const BlockKernels& kernels() {
  return of_isa(baseline::block_kernels, baseline::block_kernels, baseline::block_kernels);
}
#endif

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

uint8_t* bytes_in(const Tensor& tensor, const char* name, int64_t numel) {
  check_flat(tensor, name, numel);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte, name, " must be uint8");
  return static_cast<uint8_t*>(tensor.data_ptr());
}

void check_block(int64_t block) {
  STD_TORCH_CHECK(block >= 32 && block <= TILE && (block & (block - 1)) == 0, "block_numel = ", block,
                  " must be 32, 64, 128, 256, 512 or 1024");
}

// Runs `work(begin, end)` for tiles of [0, numel), in torch's threads.
template <class Work>
void spread_tiles(int64_t numel, const Work& work) {
  torch::stable::parallel_for(0, ceil_div(numel, TILE), GRAIN / TILE, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i * TILE, std::min((i + 1) * TILE, numel));
  });
}

float scale_of(double sum, int64_t count, bool root_mean_square, float gain) {
  const double mean = sum / static_cast<double>(count);
  return static_cast<float>(root_mean_square ? std::sqrt(mean) : mean) * gain;
}

void sign_pack(const Tensor& value, const Tensor& error, const Tensor& signs, const Tensor& scales, int64_t block,
               bool root_mean_square, double gain) {
  const float share = static_cast<float>(gain);
  const int64_t numel = value.numel();
  Kind kind;
  const void* const from = stream(value, "value", numel, &kind);
  float* const kept = wide(error, "error", numel);
  uint8_t* const bits = bytes_in(signs, "signs", ceil_div(numel, 8));
  if (block != 0) check_block(block);
  float* const found = wide(scales, "scales", block == 0 ? 1 : ceil_div(numel, block));
  const BlockKernels& chosen = kernels();
  if (block == 0) {
    std::vector<double> sums(static_cast<size_t>(ceil_div(numel, TILE)));
    spread_tiles(numel, [&](int64_t begin, int64_t end) {
      sums[static_cast<size_t>(begin / TILE)] = chosen.sum_sizes(from, kind, kept, root_mean_square, begin, end);
    });
    double total = 0.0;
    for (const double sum : sums) total += sum;
    *found = numel == 0 ? 0.0f : scale_of(total, numel, root_mean_square, share);
    spread_tiles(numel, [&](int64_t begin, int64_t end) {
      chosen.sign_pack(from, kind, kept, bits, *found, begin, end);
    });
    return;
  }
  spread_tiles(numel, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += block) {
      const int64_t stop = std::min(at + block, end);
      const double sum = chosen.sum_sizes(from, kind, kept, root_mean_square, at, stop);
      found[at / block] = scale_of(sum, stop - at, root_mean_square, share);
      chosen.sign_pack(from, kind, kept, bits, found[at / block], at, stop);
    }
  });
}

void sign_unpack(const Tensor& signs, const Tensor& scales, const Tensor& out, int64_t block, double factor) {
  const int64_t numel = out.numel();
  Kind kind;
  void* const to = stream(out, "out", numel, &kind);
  if (block != 0) check_block(block);
  const int64_t width = ceil_div(numel, 8), count = block == 0 ? 1 : ceil_div(numel, block);
  const int64_t parts = signs.size(0);
  const uint8_t* const bits = bytes_in(signs, "signs", parts * width);
  const float* const found = wide(scales, "scales", parts * count);
  const BlockKernels& chosen = kernels();
  const int64_t wide_block = block == 0 ? std::max<int64_t>(numel, 1) : block;
  spread_tiles(numel, [&](int64_t begin, int64_t end) {
    chosen.sign_unpack(bits, width, found, count, parts, wide_block, to, kind, static_cast<float>(factor), begin,
                       end);
  });
}

void quantize(const Tensor& flat, const Tensor& values, const Tensor& absmax, const OptionalTensor& error,
              int64_t bits, int64_t block) {
  const int64_t numel = flat.numel();
  Kind kind;
  const void* const from = stream(flat, "flat", numel, &kind);
  check_block(block);
  STD_TORCH_CHECK(bits == 8 || bits == 4, "bits = ", bits, " must be 8 or 4");
  uint8_t* const to = bytes_in(values, "values", ceil_div(numel * bits, 8));
  float* const largest = wide(absmax, "absmax", ceil_div(numel, block));
  float* const kept = error.has_value() ? wide(*error, "error", numel) : nullptr;
  const BlockKernels& chosen = kernels();
  spread_tiles(numel, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += block) {
      const int64_t stop = std::min(at + block, end);
      largest[at / block] = chosen.quantize(from, kind, to, kept, static_cast<int>(bits), at, stop);
    }
  });
}

void dequantize(const Tensor& values, const Tensor& absmax, const Tensor& out, int64_t bits, int64_t block,
                double factor) {
  const int64_t numel = out.numel();
  Kind kind;
  void* const to = stream(out, "out", numel, &kind);
  check_block(block);
  STD_TORCH_CHECK(bits == 8 || bits == 4, "bits = ", bits, " must be 8 or 4");
  const int64_t parts = values.size(0), width = ceil_div(numel * bits, 8), count = ceil_div(numel, block);
  const uint8_t* const from = bytes_in(values, "values", parts * width);
  const float* const largest = wide(absmax, "absmax", parts * count);
  const BlockKernels& chosen = kernels();
  spread_tiles(numel, [&](int64_t begin, int64_t end) {
    chosen.dequantize(from, width, largest, count, parts, block, static_cast<int>(bits), to, kind,
                      static_cast<float>(factor), begin, end);
  });
}

}  // namespace
}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CPU, m) {
  m.impl("sign_pack_", TORCH_BOX(&xds::sign_pack));
  m.impl("sign_unpack_", TORCH_BOX(&xds::sign_unpack));
  m.impl("quantize_", TORCH_BOX(&xds::quantize));
  m.impl("dequantize_", TORCH_BOX(&xds::dequantize));
}
