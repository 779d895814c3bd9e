// Streams, events and generators of the device, and what torch asks of a build that has it.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace {

// -- streams and events -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  Device getDevice() const override { return Device(kType, t_device); }
  void setDevice(Device d) const override { if (d.has_index()) t_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.has_index()) t_device = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::UNSAFE, d, t_stream); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, d, 0); }
  Stream getNewStream(Device d, int) const override {
    refuse_if_plain(true, "streams");
    std::lock_guard guard(state().lock);
    auto& next = state().next_stream;
    if (next == kStreams) next = state().first_stream;  // torch's pool goes round too
    return Stream(Stream::UNSAFE, d, next++);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    t_stream = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    refuse_if_plain(true, "events");
    std::lock_guard guard(state().lock);
    if (!*event) *event = new Event;
    auto& clock = state().clocks[stream.id()];
    join(clock, state().host);
    ((Event*)*event)->clock = clock;
    ((Event*)*event)->is_recorded = true;
    ((Event*)*event)->is_timed = flag == c10::EventFlag::BACKEND_DEFAULT;
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
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    TORCH_CHECK(((Event*)first)->is_timed && ((Event*)last)->is_timed, "an event without timing has no time");
    return 1.0;
  }
};
const c10::impl::DeviceGuardImplRegistrar g_guard(kType, new Guard);

// -- generators and what torch asks of a build -----------------------------------------------------------

struct Draws final : at::CPUGeneratorImpl {
  explicit Draws(uint64_t seed = 0) : at::CPUGeneratorImpl(seed) {
    device_ = Device(kType, t_device);
    key_set_ = c10::DispatchKeySet(kKey);
  }
};

}  // namespace

namespace at {
template <class Base>
struct Hooks : Base {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(DeviceIndex d) const override { t_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = t_device; t_device = d; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard guard(state().lock);
    return is_pinned(data);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  Device getDeviceFromPtr(void*) const override { return Device(kType, state().index); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator made = at::make_generator<Draws>(0);
    return made;
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<Draws>(0); }
};

struct CudaHooks final : Hooks<CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return t_device; }
  Allocator* getCUDADeviceAllocator() const override { return &g_allocator; }
  void deviceSynchronize(DeviceIndex) const override { Guard().synchronizeDevice(0); }
};

const bool g_is_registered = [] {
  if (kIsCuda) {
    CUDAHooksRegistry()->Register("CUDAHooks", [](CUDAHooksArgs) -> std::unique_ptr<CUDAHooksInterface> {
      return std::make_unique<CudaHooks>();
    });
  } else {
    RegisterPrivateUse1HooksInterface(new Hooks<PrivateUse1HooksInterface>);
    c10::register_privateuse1_backend(kName);
  }
  return true;
}();
}  // namespace at
