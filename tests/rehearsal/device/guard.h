// Streams, events and generators of the device, and what torch asks of a build with CUDA.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace {

// -- streams and events -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); t_device = d.index(); return old; }
  Device getDevice() const override { return Device(DeviceType::CUDA, t_device); }
  void setDevice(Device d) const override { t_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { t_device = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), t_stream); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), 0); }
  Stream getNewStream(Device d, int) const override {
    std::lock_guard guard(state().lock);
    auto& next = state().next_stream;
    if (next == kStreams) next = state().first_stream;  // torch's pool goes round too
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), next++);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    t_stream = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard guard(state().lock);
    if (!*event) *event = new Event;
    auto& clock = state().clocks[stream.id()];
    join(clock, state().host);
    ((Event*)*event)->clock = clock;
    ((Event*)*event)->is_recorded = true;
  }
  void block(void* event, const Stream& stream) const override {
    std::lock_guard guard(state().lock);
    if (event) join(state().clocks[stream.id()], ((Event*)event)->clock);
    if (state().records) state().log.push_back("wait " + std::to_string(stream.id()));
  }
  bool queryEvent(void* event) const override {
    std::lock_guard guard(state().lock);
    if (!event) return true;
    join(state().host, ((Event*)event)->clock);  // the device is as fast as can be
    land(state().host);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(((Event*)event)->clock, "event");
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  bool queryStream(const Stream& stream) const override {
    std::lock_guard guard(state().lock);
    join(state().host, state().clocks[stream.id()]);
    land(state().host);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { host_waits(state().clocks[stream.id()], "stream"); }
  void synchronizeDevice(const DeviceIndex) const override {
    Clock all = state().host;
    for (auto& clock : state().clocks) join(all, clock);
    host_waits(all, "device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    g_allocator.recordStream(data, stream);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// -- generators and what torch asks of a CUDA build -----------------------------------------------------------

struct Draws final : at::CPUGeneratorImpl {
  explicit Draws(uint64_t seed = 0) : at::CPUGeneratorImpl(seed) {
    device_ = Device(DeviceType::CUDA, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return t_device; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(DeviceIndex d) const override { t_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = t_device; t_device = d; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard guard(state().lock);
    return is_pinned(data);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  Allocator* getCUDADeviceAllocator() const override { return &g_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator made = at::make_generator<Draws>(0);
    return made;
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<Draws>(0); }
  void deviceSynchronize(DeviceIndex) const override { Guard().synchronizeDevice(0); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
