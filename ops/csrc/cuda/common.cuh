// Shared by all CUDA kernels of xds: argument checks, dtypes, packs of elements, the stream, the launch.
//
// Uses only torch's stable ABI and the CUDA runtime. Nothing here synchronizes with the device.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "halves.cuh"

// Defined in libtorch_cuda; torch's header declares it for CUDA builds of torch only. It is not weak: then a linker
// could leave libtorch_cuda out, and the first launch would call a null pointer.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace xds {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int kThreads = 256;  // of every block

// ---------------------------------------------------------------------------------------------- checks

inline std::string names_of(std::initializer_list<ScalarType> types) {
  std::string names;
  for (ScalarType type : types) {
    names += names.empty() ? "" : " or ";
    names += torch::headeronly::toString(type);
  }
  return names;
}

// The checks of one call. The first tensor sets the device, and the number of elements of the flat tensors.
class Checks {
 public:
  Checks(const char* op, const char* first_name, const Tensor& first)
      : op_(op), first_name_(first_name), device_(first.get_device_index()), numel_(first.numel()) {
    STD_TORCH_CHECK(first.is_cuda(), "xds::", op_, ": ", first_name_, " is not on a CUDA device");
  }

  // 1-D, contiguous, as long as the first, of one of `types`.
  void flat(const Tensor& tensor, const char* name, std::initializer_list<ScalarType> types) const {
    check_type(tensor, name, types);
    STD_TORCH_CHECK(
        tensor.dim() == 1 && tensor.is_contiguous(), "xds::", op_, ": ", name, " has ", tensor.dim(),
        " dimensions", tensor.is_contiguous() ? "" : " and gaps", "; it needs to be 1-D and contiguous");
    STD_TORCH_CHECK(
        tensor.numel() == numel_, "xds::", op_, ": ", name, " has ", tensor.numel(), " elements and ",
        first_name_, " ", numel_, "; they need to be as long as one another");
  }

  void flat(const MaybeTensor& tensor, const char* name, std::initializer_list<ScalarType> types) const {
    if (tensor.has_value()) flat(*tensor, name, types);
  }

  // One fp32 number on the device; null where the tensor is None.
  const float* number(const MaybeTensor& tensor, const char* name) const {
    if (!tensor.has_value()) return nullptr;
    check_type(*tensor, name, {ScalarType::Float});
    STD_TORCH_CHECK(
        tensor->numel() == 1, "xds::", op_, ": ", name, " has ", tensor->numel(),
        " elements; it needs to be one number");
    return static_cast<const float*>(tensor->const_data_ptr());
  }

  // On the first one's device, contiguous and of one of `types`; any shape.
  void on_device(const Tensor& tensor, const char* name, std::initializer_list<ScalarType> types) const {
    check_type(tensor, name, types);
    STD_TORCH_CHECK(
        tensor.is_contiguous(), "xds::", op_, ": ", name, " has gaps; it needs to be contiguous");
  }

  void that(bool is_fine, const char* sentence) const {
    STD_TORCH_CHECK(is_fine, "xds::", op_, ": ", sentence);
  }

 private:
  void check_type(const Tensor& tensor, const char* name, std::initializer_list<ScalarType> types) const {
    STD_TORCH_CHECK(
        tensor.is_cuda() && tensor.get_device_index() == device_, "xds::", op_, ": ", name,
        " is not on the CUDA device of ", first_name_, ", which is number ", device_);
    const ScalarType type = tensor.scalar_type();
    STD_TORCH_CHECK(
        std::find(types.begin(), types.end(), type) != types.end(), "xds::", op_, ": ", name, " is ",
        torch::headeronly::toString(type), "; it needs to be ", names_of(types));
  }

  const char* op_;
  const char* first_name_;
  int32_t device_;
  int64_t numel_;
};

// ---------------------------------------------------------------------------------------------- dtypes

template <class T>
struct Type {
  using type = T;
};

// Call `body(Type<T>{})` for the checked dtype of a tensor.
template <class Body>
void with_float_type(ScalarType type, Body&& body) {
  if (type == ScalarType::BFloat16) return body(Type<BFloat16>{});
  if (type == ScalarType::Half) return body(Type<Half>{});
  return body(Type<float>{});
}

template <class Body>
void with_state_type(ScalarType type, Body&& body) {
  if (type == ScalarType::BFloat16) return body(Type<BFloat16>{});
  return body(Type<float>{});
}

constexpr std::initializer_list<ScalarType> kFloat = {ScalarType::Float};
constexpr std::initializer_list<ScalarType> kFloats = {
    ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
constexpr std::initializer_list<ScalarType> kStateTypes = {ScalarType::Float, ScalarType::BFloat16};

// --------------------------------------------------------------------------------------------- vectors

// N neighbours as one access: 16 bytes for four fp32, 8 for four bf16 (a warp still reads whole sectors).
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// A pack as one machine word.
template <int kBytes>
struct Word {};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<32> {
  struct alignas(32) type {
    uint4 low, high;
  };
};
template <class T, int N>
using WordOf = typename Word<sizeof(T) * N>::type;

template <int N, class T>
__device__ inline Pack<T, N> load(const T* from) {
  const WordOf<T, N> word = *reinterpret_cast<const WordOf<T, N>*>(from);
  Pack<T, N> pack;
  memcpy(&pack, &word, sizeof(pack));
  return pack;
}

// The compiler takes an assignment of a vector apart: STG.E four times instead of STG.E.128, seen in SASS.
template <class W>
__device__ inline void put(W* to, const W& word) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(W) == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y),
                 "r"(word.z), "r"(word.w)
                 : "memory");
    return;
  } else if constexpr (sizeof(W) == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word.x), "r"(word.y) : "memory");
    return;
  }
#endif
  *to = word;
}

template <int N, class T>
__device__ inline void store(T* to, const Pack<T, N>& pack) {
  WordOf<T, N> word;
  memcpy(&word, &pack, sizeof(pack));
  put(reinterpret_cast<WordOf<T, N>*>(to), word);
}

// The destination of the new values. Its dtype is a run-time value, because no work depends on a store.
struct Out {
  enum Kind { kNone, kBFloat16, kHalf, kFloat, kUpper };

  void* data = nullptr;
  int type = kNone;
};

inline Out out_of(const MaybeTensor& tensor) {
  if (!tensor.has_value()) return {};
  const ScalarType type = tensor->scalar_type();
  const int kind = type == ScalarType::BFloat16 ? Out::kBFloat16
                   : type == ScalarType::Half   ? Out::kHalf
                                                : Out::kFloat;
  return {tensor->mutable_data_ptr(), kind};
}

template <class T, int N>
__device__ inline void store_as(void* to, int64_t at, const Pack<float, N>& values) {
  Pack<T, N> narrow;
#pragma unroll
  for (int i = 0; i < N; ++i) narrow.at[i] = static_cast<T>(values.at[i]);
  store<N>(static_cast<T*>(to) + at, narrow);
}

template <int N>
__device__ inline void store_out(const Out& out, int64_t at, const Pack<float, N>& values) {
  int type = out.type;
  asm volatile("" : "+r"(type));  // otherwise the compiler copies the whole kernel for each dtype
  if (type == Out::kNone) return;
  if (type == Out::kBFloat16) return store_as<BFloat16, N>(out.data, at, values);
  if (type == Out::kHalf) return store_as<Half, N>(out.data, at, values);
  if (type == Out::kUpper) return store_as<Upper, N>(out.data, at, values);
  store_as<float, N>(out.data, at, values);
}

// Where 16-bit words differ from `values` rounded, bit for bit, a script has written them: they become the values.
template <class T, int N>
__device__ inline void take_edits_of(const Pack<unsigned short, N>& written, Pack<float, N>& values) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const T rounded = static_cast<T>(values.at[i]);
    unsigned short word;
    memcpy(&word, &rounded, sizeof(word));
    T given;
    memcpy(&given, &written.at[i], sizeof(given));
    if (word != written.at[i]) values.at[i] = static_cast<float>(given);
  }
}

template <int N>
__device__ inline void take_edits(
    const Out& out, const Pack<unsigned short, N>& written, Pack<float, N>& values) {
  int type = out.type;
  asm volatile("" : "+r"(type));
  if (type == Out::kBFloat16) return take_edits_of<BFloat16, N>(written, values);
  if (type == Out::kUpper) return take_edits_of<Upper, N>(written, values);
  take_edits_of<Half, N>(written, values);
}

// Whether a pack of four of this tensor, `at` elements after its start, may be read with one access.
inline bool takes_packs(const Tensor& tensor, int64_t at, int64_t item_bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return (address + at * item_bytes) % (4 * item_bytes) == 0;
}

inline int64_t item_bytes(ScalarType type) {
  if (type == ScalarType::Double || type == ScalarType::Long) return 8;
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Short ? 2 : 4;
}

// ---------------------------------------------------------------------------------------------- launch

inline void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "xds: ", what, ": ", cudaGetErrorString(error));
}

// Makes the device of a tensor current during its lifetime; has torch's current stream on that device.
class __attribute__((visibility("hidden"))) Place {
 public:
  explicit Place(const Tensor& tensor)
      : device_(tensor.get_device_index()), guard_(device_) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  // One launch of at least one block. It also reports errors of earlier work.
  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t blocks, Arguments&&... arguments) const {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(std::max<int64_t>(blocks, 1)));
    config.blockDim = dim3(kThreads);
    config.stream = stream_;
    check_cuda(
        cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "a launch");
  }

  // One launch over `work` pieces: a block for each, or as many blocks as run at once, which stride over them.
  template <auto kKernel, class... Arguments>
  void launch_over(int64_t work, Arguments&&... arguments) const {
    launch(kKernel, std::min(work, resident_blocks<kKernel>()), std::forward<Arguments>(arguments)...);
  }

 private:
  // The number of blocks of a kernel that run at once. CUDA is asked once for a kernel and a device.
  template <auto kKernel>
  int64_t resident_blocks() const {
    constexpr int kDevices = 64;
    static std::atomic<int64_t> known[kDevices] = {};  // 0: not asked yet
    if (device_ >= kDevices) return ask_resident_blocks(kKernel);
    int64_t blocks = known[device_].load(std::memory_order_relaxed);
    if (blocks == 0) {
      blocks = ask_resident_blocks(kKernel);
      known[device_].store(blocks, std::memory_order_relaxed);  // two threads store the same
    }
    return blocks;
  }

  template <class Kernel>
  static int64_t ask_resident_blocks(Kernel kernel) {
    int device = 0, processors = 0, blocks = 0;
    check_cuda(cudaGetDevice(&device), "the current device");
    check_cuda(
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "the number of multiprocessors");
    check_cuda(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0), "the occupancy");
    return int64_t(processors) * std::max(blocks, 1);
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// ---------------------------------------------------------------------------------------------- device

// Whether the step must change nothing; true for nan as well.
__device__ inline bool skips(const float* found_inf) {
  return found_inf != nullptr && *found_inf != 0.0f;
}

__device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

__device__ inline float number_or(const float* number, float otherwise) {
  return number == nullptr ? otherwise : *number;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace xds
