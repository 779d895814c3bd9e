// What a device would do and when: streams and their clocks, who uses which bytes, what went wrong.
//
// Every stream has a clock that counts its launches. A clock vector says up to which launch of each stream something
// comes after. An event is a copy of a stream's vector; a stream that waits for it takes the larger of both. So two uses
// of the same bytes on two streams are ordered if the later one's vector includes the earlier one's launch. This is what
// torch's own sanitizer of CUDA streams does, torch/cuda/_sanitizer.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

namespace {

// Its place in torch: that of CUDA, or, for XDS_STAND_IN=xsim, one of its own, where nothing has CUDA's name.
const bool kIsCuda = [] {
  const char* name = std::getenv("XDS_STAND_IN");
  return !name || std::string(name) != "xsim";
}();
const auto kType = kIsCuda ? DeviceType::CUDA : DeviceType::PrivateUse1;
const auto kKey = kIsCuda ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
const char* const kName = kIsCuda ? "cuda" : "xsim";
const DeviceIndex kDevices = kIsCuda ? 1 : 4;
constexpr int kStreams = 16;
constexpr char kUnknown = (char)0xff;  // each byte of what is not known yet: not a number, in every floating type
constexpr size_t kCell = 2;  // bytes whose users are known together: two neighbours in bf16 may differ
using Clock = std::array<uint32_t, kStreams>;

struct Cell {
  uint32_t written_at = 0;
  int16_t writer = -1;  // a stream
  bool is_read = false;
  std::array<uint32_t, kStreams> read_at{};
};

struct Block {  // of memory, as the allocator gives it
  char* data;
  size_t size;
  StreamId stream;  // may use it again at once when it is freed
  std::vector<Cell> cells;
  std::vector<bool> kept = std::vector<bool>(kStreams, false);  // record_stream
};

struct Event {
  Clock clock{};
  bool is_recorded = false, is_timed = false;
};

struct Pending {  // a copy to or from pinned memory that is still in flight
  StreamId stream;
  uint32_t at;
  char* to;
  std::vector<char> bytes;
  const char* from;
  std::string what;
};

struct State {
  std::recursive_mutex lock;
  std::map<char*, Block> blocks;
  std::map<char*, size_t> pinned;
  std::array<Clock, kStreams> clocks{};
  Clock host{};
  StreamId first_stream = 1;  // those before it live as long as the process
  StreamId next_stream = 1;
  std::vector<Pending> pending;
  std::vector<char*> leaving;  // pinned memory of torch's allocator, freed before the copy was over: it waits
  std::vector<std::string> faults;
  std::vector<std::string> log;
  std::map<std::string, int64_t> counts;
  size_t allocated = 0, peak = 0;
  bool records = false;       // a log of launches, waits and messages
  bool raises = false;        // at the first fault, where it happens
  bool refuses_sync = false;  // raise where the host waits
  bool logs_memory = false;   // allocations and frees; then nobody's use of bytes is known
  DeviceIndex index = 0;      // of this process; the others belong to other ranks
  bool is_plain = false;      // no fp64, no streams, no events, no page-locked memory: one queue, as Apple's
};

State& state() {
  static State* made = new State;
  return *made;
}

thread_local DeviceIndex t_device = 0;
thread_local StreamId t_stream = 0;
thread_local const char* t_op = "?";  // what runs, for messages
thread_local const char* t_purpose = "";  // of memory that is allocated now
thread_local bool t_is_worker = false;  // a thread that Python started: its waits are counted apart

void fault(const std::string& text) {
  state().faults.push_back(text);
  TORCH_CHECK(!state().raises, text);
}

void refuse_if_plain(bool needs, const char* what) {
  TORCH_CHECK(!needs || !state().is_plain, "this device has no ", what);
}

void join(Clock& into, const Clock& other) {
  for (int at = 0; at < kStreams; ++at) into[at] = std::max(into[at], other[at]);
}

Block* block_of(const void* data) {
  auto& blocks = state().blocks;
  auto next = blocks.upper_bound((char*)data);
  if (next == blocks.begin()) return nullptr;
  auto& found = std::prev(next)->second;
  return (char*)data < found.data + found.size ? &found : nullptr;
}

bool is_pinned(const void* data) {
  auto& pinned = state().pinned;
  auto next = pinned.upper_bound((char*)data);
  return next != pinned.begin() && (char*)data < std::prev(next)->first + std::prev(next)->second;
}

// -- time ---------------------------------------------------------------------------------------------------

bool meets(const Pending& p, const char* data, size_t size) {
  const char* used = p.to ? p.to : p.from;
  return used && used < data + size && data < used + p.bytes.size();
}

bool in_flight(const char* data) {  // a pending copy uses this page-locked memory
  auto& s = state();
  return std::any_of(s.pending.begin(), s.pending.end(), [&](const Pending& p) { return meets(p, data, s.pinned[(char*)data]); });
}

void land(const Clock& done) {  // pending copies that `done` includes have been executed
  auto& s = state();
  auto& all = s.pending;
  auto stays = std::stable_partition(all.begin(), all.end(), [&](const Pending& p) { return p.at > done[p.stream]; });
  std::vector<Pending> landed(std::make_move_iterator(stays), std::make_move_iterator(all.end()));
  all.erase(stays, all.end());
  for (auto& p : landed)
    if (p.to && std::any_of(p.to, p.to + p.bytes.size(), [](char c) { return c != kUnknown; }))
      fault(p.what + ": its pinned target was written while the copy was in flight");
  for (auto& p : landed) {
    if (p.to) memcpy(p.to, p.bytes.data(), p.bytes.size());
    else if (p.from && memcmp(p.from, p.bytes.data(), p.bytes.size()))
      fault(p.what + ": its pinned source was changed while the copy was in flight");
  }
  for (auto& p : all)  // the bytes of a later copy to the same memory are not known
    for (auto& before : landed)
      if (p.to && before.to && meets(before, p.to, p.bytes.size())) memset(p.to, kUnknown, p.bytes.size());
  auto& leaving = state().leaving;
  auto ends = std::partition(leaving.begin(), leaving.end(), [](char* data) { return in_flight(data); });
  for (auto at = ends; at != leaving.end(); ++at) {
    state().pinned.erase(*at);
    free(*at);
  }
  leaving.erase(ends, leaving.end());
}

// A copy of `stream` begins that uses page-locked memory: other copies that use it have to come before.
void meet_pending(const char* data, size_t size, bool writes, StreamId stream, const char* what) {
  for (auto& p : state().pending) {
    if (!meets(p, data, size) || !(writes || p.to)) continue;
    if (p.at > state().clocks[stream][p.stream])
      fault(std::string(what) + ": a copy of stream " + std::to_string(p.stream) + " still uses its page-locked memory");
    else if (!p.to)
      p.from = nullptr;  // it has read before
  }
}

// The bytes of page-locked memory as a copy on a stream finds them, after the copies before it.
std::vector<char> bytes_for_copy(const char* data, size_t size) {
  std::vector<char> found(data, data + size);
  for (auto& p : state().pending) {
    if (!p.to || !meets(p, data, size)) continue;
    const char *low = std::max<const char*>(p.to, data), *high = std::min<const char*>(p.to + p.bytes.size(), data + size);
    memcpy(found.data() + (low - data), p.bytes.data() + (low - p.to), high - low);
  }
  return found;
}

bool is_over(const Clock& clock) {  // the host has waited for all of it
  for (int at = 0; at < kStreams; ++at)
    if (clock[at] > state().host[at]) return false;
  return true;
}

void host_waits(const Clock& clock, const char* what) {
  auto& s = state();
  std::lock_guard guard(s.lock);
  if (is_over(clock)) return;  // the host knows: it returns at once
  TORCH_CHECK(!s.refuses_sync || t_is_worker, "the host waits for the device: ", what);
  join(s.host, clock);
  land(s.host);
  s.counts[std::string(t_is_worker ? "worker " : "") + what]++;
  if (s.records) s.log.push_back(std::string("sync ") + what);
}

// -- accesses -----------------------------------------------------------------------------------------------

void touch(const at::Tensor& t, bool writes, StreamId stream) {
  if (!t.defined() || t.numel() == 0) return;
  auto& s = state();
  char* data = (char*)t.data_ptr();
  Block* block = block_of(data);
  if (!block) {
    fault(std::string(t_op) + ": a tensor of memory that is freed or is not the device's");
    return;
  }
  auto& clock = s.clocks[stream];
  std::string worst;
  auto one = [&](size_t from, size_t to) {
    for (size_t at = from / kCell; at <= (to - 1) / kCell && at < block->cells.size(); ++at) {
      auto& cell = block->cells[at];
      if (cell.writer >= 0 && cell.writer != stream && cell.written_at > clock[cell.writer])
        worst = std::string(writes ? "writes" : "reads") + " what stream " + std::to_string(cell.writer) + " wrote";
      if (writes && cell.is_read)
        for (int r = 0; r < kStreams; ++r)
          if (r != stream && cell.read_at[r] > clock[r])
            worst = "writes what stream " + std::to_string(r) + " still reads";
      if (writes) {
        cell.writer = stream;
        cell.written_at = clock[stream];
      } else {
        cell.is_read = true;
        cell.read_at[stream] = clock[stream];
      }
    }
  };
  size_t start = data - block->data, item = t.element_size();
  if (t.is_non_overlapping_and_dense()) {
    one(start, start + t.numel() * item);
  } else {  // each element
    auto sizes = t.sizes(), strides = t.strides();
    std::vector<int64_t> index(sizes.size(), 0);
    for (int64_t n = 0; n < t.numel(); ++n) {
      int64_t offset = 0;
      for (size_t d = 0; d < sizes.size(); ++d) offset += index[d] * strides[d];
      one(start + offset * item, start + (offset + 1) * item);
      for (int d = (int)sizes.size() - 1; d >= 0; --d) {
        if (++index[d] < sizes[d]) break;
        index[d] = 0;
      }
    }
  }
  if (!worst.empty()) fault(std::string(t_op) + " on stream " + std::to_string(stream) + " " + worst + " without waiting");
}

StreamId launch(const char* op) {  // a kernel of the current stream begins
  auto& s = state();
  StreamId stream = t_stream;
  join(s.clocks[stream], s.host);
  s.clocks[stream][stream]++;
  s.counts["launch"]++;
  if (s.records) s.log.push_back("op " + std::to_string(stream) + " " + op);
  return stream;
}

}  // namespace
