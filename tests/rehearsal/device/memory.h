// Memory of the device, which is memory of the host: filled with NaN before it is used and when it is freed.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include "clocks.h"

namespace {

// -- memory -------------------------------------------------------------------------------------------------

void free_block(void* data) {
  if (!data) return;
  auto& s = state();
  std::lock_guard guard(s.lock);
  auto found = s.blocks.find((char*)data);
  if (found == s.blocks.end()) return;
  Block& block = found->second;
  auto clock = s.clocks[block.stream];
  join(clock, s.host);
  for (int r = 0; r < kStreams; ++r) {
    if (r == block.stream || block.kept[r]) continue;
    for (auto& cell : block.cells) {
      uint32_t used = std::max(cell.read_at[r], cell.writer == r ? cell.written_at : 0);
      if (used > clock[r]) {
        fault("memory of " + std::to_string(block.size) + " bytes is freed on stream " + std::to_string(block.stream) +
              " while stream " + std::to_string(r) + " uses it, without record_stream");
        break;
      }
    }
  }
  memset(block.data, 0xff, block.size);  // not a number, in every floating type
  if (s.logs_memory) s.log.push_back("free " + std::to_string((uintptr_t)block.data));
  s.allocated -= block.size;
  free(block.data);
  s.blocks.erase(found);
}

struct HostCuda final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(kType, t_device);
    TORCH_CHECK(t_device == state().index, "memory of device ", (int)t_device, ", which is another rank's");
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    void* data = nullptr;
    size_t rounded = (size + 511) / 512 * 512;
    TORCH_CHECK(posix_memalign(&data, 512, rounded) == 0, "no memory");
    memset(data, 0xff, rounded);
    auto& s = state();
    std::lock_guard guard(s.lock);
    size_t cells = s.logs_memory ? 0 : rounded / kCell;
    s.blocks[(char*)data] = Block{(char*)data, rounded, t_stream, std::vector<Cell>(cells)};
    if (s.logs_memory)
      s.log.push_back("alloc " + std::to_string((uintptr_t)data) + " " + std::to_string(size) + " " + std::to_string(t_stream) + t_purpose);
    s.allocated += rounded;
    s.peak = std::max(s.peak, s.allocated);
    return {data, data, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    std::lock_guard guard(state().lock);
    if (auto* block = block_of(data.get())) block->kept[stream.id()] = true;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { state().peak = state().allocated; }
};
HostCuda g_allocator;

void pin(void* data, size_t size) {
  std::lock_guard guard(state().lock);
  state().pinned[(char*)data] = std::max<size_t>(size, 1);
}

void unpin(void* data) {
  auto& s = state();
  std::lock_guard guard(s.lock);
  if (in_flight((char*)data)) fault("page-locked memory is freed while a copy of it is in flight");
  s.pinned.erase((char*)data);
}

void free_pinned(void* data) {  // torch's allocator keeps the memory until its copies are over
  auto& s = state();
  std::lock_guard guard(s.lock);
  if (in_flight((char*)data)) {
    s.leaving.push_back((char*)data);
    return;
  }
  s.pinned.erase((char*)data);
  free(data);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    refuse_if_plain(true, "page-locked memory");
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, std::max<size_t>(size, 1)) == 0, "no memory");
    pin(data, size);
    return {data, data, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
Pinned g_pinned;

}  // namespace
