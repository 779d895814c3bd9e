// A device that is host memory: every op computes its numbers at once, on the CPU, and is recorded with its stream.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include "guard.h"

namespace at::autocast {  // ATen/autocast_mode.h, which takes seconds to read
TORCH_API ScalarType get_autocast_dtype(DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
}  // namespace at::autocast

namespace {

// -- ops ------------------------------------------------------------------------------------------------------

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

at::Tensor alias_of(const at::Tensor& t) {  // the same memory, as a tensor of the CPU
  auto storage = t.storage();
  auto keep = storage;  // alive as long as the alias
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(keep), [](void* s) { delete (c10::Storage*)s; },
                    Device(DeviceType::CPU));
  c10::Storage on_host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU), true);
  auto made = at::detail::make_tensor<at::TensorImpl>(std::move(on_host), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  made.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor view_of(const at::Tensor& original, const at::Tensor& alias) {  // in inference mode it is as its base
  auto keys = original.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  auto made = at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(original.storage()), keys, alias.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
  made.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
  if (alias.is_conj()) made._set_conj(true);
  if (alias.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor to_device(const at::Tensor& result) {
  refuse_if_plain(result.scalar_type() == at::kDouble, "fp64");
  at::Tensor made = at::detail::empty_strided_generic(
      result.sizes(), result.strides(), &g_allocator, c10::DispatchKeySet(kKey), result.scalar_type());
  if (result.storage().nbytes() && result.numel())
    alias_of(made).copy_(result);
  return made;
}

struct Pair {
  at::Tensor original, alias;
};

void copy_state(at::Generator from, at::Generator to) {
  at::Tensor found;
  {
    std::lock_guard guard(from.mutex());
    found = from.get_state();
  }
  std::lock_guard guard(to.mutex());
  to.set_state(found);
}

struct Call {
  std::vector<Pair> pairs;
  at::Generator draws, on_host;  // a generator of the device, and one of the CPU with its state
  at::Generator drawing(at::Generator given) {
    TORCH_CHECK(given.device().type() == kType, "Expected a '", kName, "' device type for generator but found 'cpu'");
    draws = given;
    on_host = at::make_generator<at::CPUGeneratorImpl>();
    copy_state(draws, on_host);
    return on_host;
  }
  at::Tensor in(const at::Tensor& t) {
    if (!on_device(t)) return t;
    for (auto& p : pairs)
      if (p.original.is_same(t)) return p.alias;
    for (auto& p : pairs)
      if (p.original.storage().is_alias_of(t.storage())) {  // views of one storage stay so
        auto made = at::detail::make_tensor<at::TensorImpl>(
            c10::Storage(p.alias.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
        made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
        made.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
        pairs.push_back({t, made});
        return made;
      }
    pairs.push_back({t, alias_of(t)});
    return pairs.back().alias;
  }
  at::Tensor out(const at::Tensor& t) {
    if (!t.defined()) return t;
    for (auto& p : pairs)
      if (p.alias.is_same(t)) return p.original;
    for (auto& p : pairs)
      if (p.alias.storage().is_alias_of(t.storage())) return view_of(p.original, t);
    return to_device(t);
  }
};

c10::IValue convert(const c10::IValue& value, Call& call, bool inwards) {
  auto one = [&](const at::Tensor& t) { return inwards ? call.in(t) : call.out(t); };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const auto& t : value.toTensorVector()) made.push_back(one(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& t : value.toOptionalTensorVector())
      made.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(one(*t)) : t);
    return made;
  }
  if (value.isDevice() && inwards && value.toDevice().type() == kType) return Device(DeviceType::CPU);
  if (value.isGenerator() && inwards && value.toGenerator().defined()) return call.drawing(value.toGenerator());
  return value;
}

void touch_all(const c10::IValue& value, bool writes, StreamId stream) {
  if (value.isTensor()) {
    if (on_device(value.toTensor())) touch(value.toTensor(), writes, stream);
  } else if (value.isTensorList()) {
    for (const auto& t : value.toTensorVector())
      if (on_device(t)) touch(t, writes, stream);
  } else if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorVector())
      if (t.has_value() && on_device(*t)) touch(*t, writes, stream);
  }
}

const char* kept_name(const std::string& name) {
  static std::map<std::string, bool>* names = new std::map<std::string, bool>;
  return names->emplace(name, true).first->first.c_str();
}

bool is_view(const c10::FunctionSchema& schema) {  // results share memory with arguments, nothing runs
  if (schema.name() == "aten::is_set_to") return true;
  for (const auto& r : schema.returns())
    if (r.alias_info() && !r.alias_info()->isWrite()) return true;
  return false;
}

void check_devices(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  // a kernel of its own reads also single numbers by their address; other ops take a number of the host for a scalar
  bool is_kernel = schema.name().rfind("xds::", 0) == 0 || schema.name().rfind("aten::_fused", 0) == 0;
  for (size_t at = 0; at < schema.arguments().size(); ++at) {
    const auto& value = stack[first + at];
    auto check = [&](const at::Tensor& t) {
      if (t.defined() && t.device().type() == DeviceType::CPU && (t.dim() > 0 || is_kernel) && schema.name() != "aten::copy_" &&
          schema.name() != "aten::index.Tensor" && schema.name() != "aten::_index_put_impl_" && schema.name() != "aten::index")
        TORCH_CHECK(false, schema.name(), ": Expected all tensors to be on the same device, but found ", kName, ":0 and cpu (argument ",
                    schema.arguments()[at].name(), ")");
    };
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList()) for (const auto& t : value.toTensorVector()) check(t);
  }
}

// ops whose result the host must know
bool needs_host(const std::string& name) {
  static const std::vector<std::string> names{"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::unique_dim",
                                              "aten::_unique2", "aten::masked_select", "aten::is_nonzero"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

// an index of booleans: the host must know how many are true
bool has_mask(const std::string& name, const std::vector<c10::IValue>& arguments) {
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  for (const auto& t : arguments[1].toOptionalTensorVector())
    if (t.has_value() && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto& s = state();
  size_t num = schema.arguments().size(), first = stack->size() - num;
  bool views = is_view(schema);
  const char* name = kept_name(schema.name());
  Call call;
  std::vector<c10::IValue> originals(stack->begin() + first, stack->end());
  StreamId stream = t_stream;
  {
    std::lock_guard guard(s.lock);
    t_op = name;
    check_devices(schema, *stack, first);
    if (!views) {
      stream = launch(name);
      for (size_t at = 0; at < num; ++at) {
        auto* info = schema.arguments()[at].alias_info();
        bool writes = info && info->isWrite();
        touch_all(originals[at], writes, stream);
      }
    }
  }
  if (needs_host(name) || has_mask(schema.name(), originals)) host_waits(s.clocks[stream], name);
  for (size_t at = 0; at < num; ++at) (*stack)[first + at] = convert((*stack)[first + at], call, true);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (call.draws.defined()) copy_state(call.on_host, call.draws);
  // an out= argument may have been resized
  for (auto& p : call.pairs) {
    if (!p.alias.sizes().equals(p.original.sizes()) || p.alias.storage().data() != p.original.storage().data()) {
      auto fresh = to_device(p.alias);
      p.original.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
      p.original.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides());
      p.original.unsafeGetTensorImpl()->set_storage_offset(0);
      p.alias = alias_of(p.original);
    }
  }
  std::lock_guard guard(s.lock);
  size_t back = stack->size() - schema.returns().size();
  for (size_t at = back; at < stack->size(); ++at) {
    (*stack)[at] = convert((*stack)[at], call, false);
    if (!views && !(schema.returns()[at - back].alias_info())) touch_all((*stack)[at], true, stream);
  }
}

struct On {  // the device of an argument is current
  DeviceIndex before = t_device;
  explicit On(std::optional<at::Device> device) {
    if (device.has_value() && device->has_index()) t_device = device->index();
  }
  ~On() { t_device = before; }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  refuse_if_plain(dtype == at::kDouble, "fp64");
  On on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &g_allocator,
                                   c10::DispatchKeySet(kKey),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  refuse_if_plain(dtype == at::kDouble, "fp64");
  On on(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &g_allocator,
      c10::DispatchKeySet(kKey), dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

constexpr size_t kStaged = 65536;  // more pageable bytes: the driver may wait for the stream before it stages them

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto& s = state();
  if (self.numel() == 0 && source.numel() == 0) return self;
  bool in = on_device(self), out = on_device(source);
  auto to = in ? alias_of(self) : self, from = out ? alias_of(source) : source;
  {
    std::lock_guard guard(s.lock);
    t_op = in && out ? "aten::copy_" : in ? "copy_to_device" : "copy_to_host";
    auto stream = launch(t_op);
    if (out) touch(source, false, stream);
    if (in) touch(self, true, stream);
    // Apple's memory is shared: such a copy to the host returns before it is done
    bool host_pinned = (in && out) || (s.is_plain && out) || is_pinned(in ? source.data_ptr() : self.data_ptr());
    bool simple = self.is_contiguous() && source.is_contiguous() && self.dtype() == source.dtype();
    if (!(in && out)) {
      if (non_blocking && host_pinned && simple) {
        s.counts["async_copy"]++;
        size_t n = self.numel() * self.element_size();
        Pending p{stream, s.clocks[stream][stream], nullptr, {}, nullptr, t_op};
        auto* bytes = (const char*)from.data_ptr();
        meet_pending(in ? bytes : (char*)self.data_ptr(), n, !in, stream, t_op);
        if (in) {
          p.bytes = bytes_for_copy(bytes, n);
          p.from = bytes;
          memcpy(to.data_ptr(), p.bytes.data(), n);
        } else {
          p.bytes.assign(bytes, bytes + n);
          p.to = (char*)self.data_ptr();
          memset(p.to, kUnknown, n);
        }
        s.pending.push_back(std::move(p));
        return self;
      }
    }
  }
  if (!in) host_waits(s.clocks[t_stream], "copy_to_host");
  else if (!out && (!non_blocking || self.nbytes() > kStaged)) host_waits(s.clocks[t_stream], "copy_to_device");
  to.copy_(from);
  return self;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  size_t need = 1;
  for (auto n : sizes) need *= n;
  need = (need + self.storage_offset()) * self.element_size();
  if (need > self.storage().nbytes()) {
    auto data = g_allocator.allocate(need);
    if (self.storage().nbytes()) memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    auto storage = self.storage();
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(need);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({(int64_t)(source.nbytes() / self.element_size())});
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  impl->set_storage_offset(source.storage_offset());
  return self;
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, &g_allocator, true));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({0});
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) { g_allocator.recordStream(self.storage().data_ptr(), stream); }

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the plain formula: the CPU has no op of CUDA's name
}

// -- what Python asks -----------------------------------------------------------------------------------------

at::Tensor host_alias(const at::Tensor& t) { return alias_of(t); }

void use(const at::Tensor& t, bool writes) {  // something that is no op of torch uses `t` on the current stream
  std::lock_guard guard(state().lock);
  t_op = "message";
  touch(t, writes, t_stream);
}
void begin(const std::string& what) {
  std::lock_guard guard(state().lock);
  t_op = kept_name(what);
  launch(t_op);
}
void note(const std::string& text) {
  if (state().records || state().logs_memory) state().log.push_back(text);
}
void pin_memory_at(int64_t address, int64_t size) {
  std::lock_guard guard(state().lock);
  state().counts["page_lock"]++;
  pin((void*)address, size);
}
void unpin_memory_at(int64_t address) { unpin((void*)address); }
void resize_storage(const at::Tensor& t, int64_t nbytes) {
  auto storage = t.storage();
  if ((size_t)nbytes == storage.nbytes()) return;
  t_purpose = " gathered";
  auto data = g_allocator.allocate(nbytes);
  t_purpose = "";
  size_t n = std::min<size_t>(nbytes, storage.nbytes());
  if (n) memcpy(data.get(), storage.data(), n);
  storage.set_data_ptr(std::move(data));
  storage.set_nbytes(nbytes);
}
std::vector<std::string> take_faults() {
  std::vector<std::string> found;
  std::lock_guard guard(state().lock);
  found.swap(state().faults);
  return found;
}
std::vector<std::string> take_log() {
  std::vector<std::string> found;
  std::lock_guard guard(state().lock);
  found.swap(state().log);
  return found;
}
std::vector<std::string> counts() {
  std::vector<std::string> found;
  std::lock_guard guard(state().lock);
  for (auto& [name, n] : state().counts) found.push_back(name + " " + std::to_string(n));
  return found;
}
void refuse_sync(bool refuses) { state().refuses_sync = refuses; }
void log_memory(bool logs) { state().logs_memory = logs; }
void set_index(int64_t index) { state().index = t_device = (DeviceIndex)index; }
void be_plain() { state().is_plain = true; }
void is_worker() { t_is_worker = true; }
void keep_streams() { state().first_stream = state().next_stream; }
void forget_streams() { state().next_stream = state().first_stream; }
void settings(bool records, bool raises) {
  state().records = records;
  state().raises = raises;
}
bool event_is_over(int64_t event) {  // the host has waited for it, or seen that it is over
  std::lock_guard guard(state().lock);
  return event && is_over(((Event*)event)->clock);
}
std::vector<int64_t> memory() { return {(int64_t)state().allocated, (int64_t)state().peak}; }
void reset_peak() { state().peak = state().allocated; }

// kernels of the CPU stand for those of the device: `name` is one launch
void use_host_kernel(const std::string& name) {
  static std::map<std::string, torch::Library*> libraries;
  auto& library = libraries[name.substr(0, name.find("::"))];
  if (!library) library = new torch::Library(torch::Library::IMPL, name.substr(0, name.find("::")), kKey, __FILE__, __LINE__);
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

struct SetUp {
  SetUp() { c10::SetAllocator(kType, &g_allocator); }
} g_set_up;

}  // namespace

using torch::detail::TorchLibraryInit;  // what TORCH_LIBRARY_IMPL writes, whose key is known here at the start

void use_fallback(torch::Library& m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
const TorchLibraryInit g_fallback(torch::Library::IMPL, use_fallback, "_", kKey, __FILE__, __LINE__);

void use_own(torch::Library& m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", sdp_choice);
  for (auto* name : {"_foreach_add_.Tensor", "_foreach_add_.Scalar"})  // one launch
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
const TorchLibraryInit g_own(torch::Library::IMPL, use_own, "aten", kKey, __FILE__, __LINE__);

// autocast of xsim: the list of CUDA's is torch's own
void cast_down(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  auto dtype = at::autocast::get_autocast_dtype(kType);
  for (size_t at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at)
    if ((*stack)[at].isTensor()) (*stack)[at] = at::autocast::cached_cast(dtype, (*stack)[at].toTensor(), kType);
  op.callBoxed(stack);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto* name : {"linear", "addmm", "mm", "bmm", "matmul"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_down>());
}

TORCH_LIBRARY(host_cuda, m) {
  m.def("take_faults() -> str[]", take_faults);
  m.def("take_log() -> str[]", take_log);
  m.def("counts() -> str[]", counts);
  m.def("settings(bool records, bool raises) -> ()", settings);
  m.def("refuse_sync(bool refuses) -> ()", refuse_sync);
  m.def("keep_streams() -> ()", keep_streams);
  m.def("forget_streams() -> ()", forget_streams);
  m.def("log_memory(bool logs) -> ()", log_memory);
  m.def("be_plain() -> ()", be_plain);
  m.def("set_index(int index) -> ()", set_index);
  m.def("is_worker() -> ()", is_worker);
  m.def("is_over(int event) -> bool", event_is_over);
  m.def("memory() -> int[]", memory);
  m.def("reset_peak() -> ()", reset_peak);
  m.def("use_host_kernel(str name) -> ()", use_host_kernel);
  m.def("begin(str what) -> ()", begin);
  m.def("note(str text) -> ()", note);
  m.def("pin(int address, int size) -> ()", pin_memory_at);
  m.def("unpin(int address) -> ()", unpin_memory_at);
  m.def("alias(Tensor t) -> Tensor");
  m.def("use(Tensor t, bool writes) -> ()");
  m.def("resize_storage(Tensor t, int nbytes) -> ()");
}
void use_tensors(torch::Library& m) {
  m.impl("alias", host_alias);
  m.impl("use", use);
  m.impl("resize_storage", resize_storage);
}
const TorchLibraryInit g_tensors(torch::Library::IMPL, use_tensors, "host_cuda", kKey, __FILE__, __LINE__);
