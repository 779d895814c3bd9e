// The functions that Python calls. Each takes plain addresses and numbers; see ops/comm/memory/library.py.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>

#include <linux/falloc.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "process.h"

#define XDS_EXPORT extern "C" __attribute__((visibility("default")))

namespace xds {
namespace {

constexpr uint64_t SMALL_BYTES = 1 << 15;  // up to it a copy is cheaper than to wait until peers have read
constexpr uint64_t STREAMED_BYTES = 16 << 20;  // of flat buffers whose sums are written past the caches
constexpr uint64_t TO_ALL = uint64_t{1} << 63;  // of a key: not a message between two ranks
constexpr int64_t LOOK_NS = 100000000;  // how often a waiting process looks whether its peers live

Process* process = nullptr;

void pause_briefly(bool yields) {
  if (yields) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The helper thread: reads what peers wait for while this process computes.
void help(Process* served) {
  Control& control = *served->control;
  for (;;) {
    const uint32_t asked = control.asked.load();
    {
      std::lock_guard<std::mutex> lock(served->mutex);
      if (served->is_stopped) return;
      progress(*served, false);
    }
    sleep_on(control.asked, asked, -1);
  }
}

// Ask the peers that have not read yet to read now.
void ask(const Operation& operation) {
  for (Peer* peer : operation.group->peers) {
    if (peer == nullptr) continue;
    peer->control->asked.fetch_add(1);
    wake(peer->control->asked);
  }
}

Operation* begin(Group* group) {
  Operation* operation = new Operation();
  operation->group = group;
  ++group->num_operations;
#if defined(__x86_64__)
  operation->control_word = _mm_getcsr();
#endif
  return operation;
}

// Read `posted` bytes of `peer`.
void expect(Operation& operation, int peer, uint64_t key, uint64_t posted) {
  Group& group = *operation.group;
  operation.reads.push_back({peer, key, group.expected[{key, peer}]++, posted, false});
}

// Copy a part of the last read.
void copy_to(Operation& operation, uint64_t skip, uint64_t size, void* into) {
  operation.copies.push_back({operation.reads.size() - 1, skip, size, static_cast<char*>(into)});
}

bool has_peer(const Group& group, int rank) { return group.peers[static_cast<size_t>(rank)] != nullptr; }

// An operation that begins with `size_bytes` from `from` on, which all peers read; nullptr: there is no room now.
Operation* begin_with(Group* group, uint64_t key, const void* from, uint64_t size_bytes, bool copies) {
  if (!has_room(*process, 1)) return nullptr;
  Operation* operation = begin(group);
  const bool stays = !copies && size_bytes > SMALL_BYTES;
  if (!post(*process, *group, key | TO_ALL, ALL, from, size_bytes, !stays, &operation->own)) {
    operation->status = Status::no_memory;
  }
  return operation;
}

Operation* run(Operation* operation) {
  if (operation->group->is_left) operation->status = Status::left;
  if (operation->status != Status::pending) return operation;
  process->running.push_back(operation);
  progress(*process, true);
  return operation;
}

}  // namespace
}  // namespace xds

using namespace xds;

// Map `size_bytes` of the file from `offset` on. Returns nullptr and sets errno where that fails.
XDS_EXPORT void* xds_map(int fd, uint64_t offset, uint64_t size_bytes, int writes) {
  const int rights = writes ? PROT_READ | PROT_WRITE : PROT_READ;
  void* at = mmap(nullptr, size_bytes, rights, MAP_SHARED | MAP_NORESERVE, fd, static_cast<off_t>(offset));
  return at == MAP_FAILED ? nullptr : at;
}

XDS_EXPORT void xds_unmap(void* at, uint64_t size_bytes) { munmap(at, size_bytes); }

XDS_EXPORT uint64_t xds_control_bytes() { return Arena::rounded(sizeof(Control)); }

// This process's own segment. After a fork the child opens another one. reserve_from: as in Process.
XDS_EXPORT void xds_open(int fd, void* control, void* data, uint64_t size_bytes, uint64_t reserve_from,
                         uint64_t token0, uint64_t token1) {
  Control* own = static_cast<Control*>(control);
  own->token[0] = token0;
  own->token[1] = token1;
  own->magic = MAGIC;
  process = new Process(fd, own, static_cast<char*>(data), size_bytes, reserve_from);
  sigset_t all, kept;  // signals are for the script's threads, which they wake
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &kept);
  std::thread(help, process).detach();
  pthread_sigmask(SIG_SETMASK, &kept, nullptr);
}

XDS_EXPORT void xds_stop() {
  if (process == nullptr) return;
  std::lock_guard<std::mutex> lock(process->mutex);
  process->is_stopped = true;
  process->control->asked.fetch_add(1);
  wake(process->control->asked);
}

// The peer with that token, if its segment is mapped. The caller uses it, here and below, until a group does.
XDS_EXPORT Peer* xds_find_peer(uint64_t token0, uint64_t token1) {
  std::lock_guard<std::mutex> lock(process->mutex);
  for (Peer* peer : process->peers) {
    if (peer->control->token[0] != token0 || peer->control->token[1] != token1) continue;
    ++peer->num_uses;
    return peer;
  }
  return nullptr;
}

// A peer whose control and data are mapped; nullptr: this is not the segment with that token.
XDS_EXPORT Peer* xds_open_peer(void* control, void* data, uint64_t data_bytes, int pid, int pidfd, uint64_t token0,
                               uint64_t token1) {
  Control* found = static_cast<Control*>(control);
  if (found->magic != MAGIC || found->token[0] != token0 || found->token[1] != token1) return nullptr;
  std::lock_guard<std::mutex> lock(process->mutex);
  process->peers.push_back(new Peer{found, static_cast<const char*>(data), data_bytes, pid, pidfd, 1});
  return process->peers.back();
}

// No group will use it.
XDS_EXPORT void xds_release_peer(Peer* peer) {
  std::lock_guard<std::mutex> lock(process->mutex);
  release(*process, peer);
}

// peers: by rank; nullptr for this rank. It uses them.
XDS_EXPORT Group* xds_open_group(uint64_t id, int rank, int size, Peer** peers) {
  Group* group = new Group();
  group->id = id;
  group->rank = rank;
  group->size = size;
  group->peers.assign(peers, peers + size);
  std::lock_guard<std::mutex> lock(process->mutex);
  sweep(*process);
  return group;
}

// This rank does not take part any more: peers that wait for it fail.
XDS_EXPORT void xds_leave_group(Group* group) {
  std::lock_guard<std::mutex> lock(process->mutex);
  leave(*process, *group);
}

// All its operations have ended. What it has posted can still be read.
XDS_EXPORT void xds_close_group(Group* group) {
  std::lock_guard<std::mutex> lock(process->mutex);
  if (!group->is_left) leave(*process, *group);
  process->closed.push_back(group);
  sweep(*process);
}

// The first rank that has not read what this one posted; -1: none.
XDS_EXPORT int xds_first_reader(Group* group) {
  std::lock_guard<std::mutex> lock(process->mutex);
  for (const Posted& posted : process->unread) {
    const int reader = posted.group == group ? first_reader(posted) : -1;
    if (reader >= 0) return reader;
  }
  for (const Operation* operation : process->running) {
    const int peer = operation->group == group ? blocking_peer(*operation) : -1;
    if (peer >= 0) return peer;
  }
  return -1;
}

XDS_EXPORT int64_t xds_allocate(uint64_t size_bytes) {
  std::lock_guard<std::mutex> lock(process->mutex);
  return process->arena.take(size_bytes);
}

// Free a block, and return its pages to the system.
XDS_EXPORT void xds_free(uint64_t offset, uint64_t file_offset) {
  std::lock_guard<std::mutex> lock(process->mutex);
  const uint64_t size_bytes = process->arena.give(offset);
  if (size_bytes == 0) return;
  fallocate(process->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(file_offset),
            static_cast<off_t>(size_bytes));
}

// into[r * size_bytes] = what rank r has at `from`. nullptr, here and below: too many messages are unread, try again.
XDS_EXPORT Operation* xds_all_gather(Group* group, uint64_t key, const void* from, void* into, uint64_t size_bytes) {
  std::lock_guard<std::mutex> lock(process->mutex);
  Operation* operation = begin_with(group, key, from, size_bytes, false);
  if (operation == nullptr) return nullptr;
  for (int step = 1; step < group->size; ++step) {  // not all from the same rank at once
    const int peer = (group->rank + step) % group->size;
    if (!has_peer(*group, peer)) continue;
    expect(*operation, peer, key | TO_ALL, size_bytes);
    copy_to(*operation, 0, size_bytes, static_cast<char*>(into) + static_cast<uint64_t>(peer) * size_bytes);
  }
  return run(operation);
}

// Post `size_bytes`, and copy parts of what the peers post. copies: of each a peer, the bytes that it posts, which of
// them, how many, and an address. Those of one peer are neighbours, and there are some of every peer.
XDS_EXPORT Operation* xds_gather_parts(Group* group, uint64_t key, const void* from, uint64_t size_bytes,
                                       int num_copies, const int64_t* copies) {
  std::lock_guard<std::mutex> lock(process->mutex);
  Operation* operation = begin_with(group, key, from, size_bytes, false);
  if (operation == nullptr) return nullptr;
  for (int i = 0; i < num_copies; ++i) {
    const int64_t* one = copies + 5 * i;
    const bool is_next = i == 0 || one[0] != one[-5];
    if (is_next) expect(*operation, static_cast<int>(one[0]), key | TO_ALL, static_cast<uint64_t>(one[1]));
    copy_to(*operation, static_cast<uint64_t>(one[2]), static_cast<uint64_t>(one[3]), reinterpret_cast<void*>(one[4]));
  }
  return run(operation);
}

// Sums over the ranks of parts of the `whole` elements that each posts. parts: of each its first element, how many,
// and an address.
XDS_EXPORT Operation* xds_sum(Group* group, uint64_t key, const void* from, int64_t whole, int kind, int out_kind,
                              int add, int copies, int num_parts, const int64_t* parts) {
  const Dtype of = static_cast<Dtype>(kind);
  const uint64_t whole_bytes = static_cast<uint64_t>(whole * bytes_of(of));
  std::lock_guard<std::mutex> lock(process->mutex);
  Operation* operation = begin_with(group, key, from, whole_bytes, copies != 0);
  if (operation == nullptr) return nullptr;
  operation->sum = {nullptr, static_cast<Dtype>(out_kind), nullptr, 0, of, add != 0, whole_bytes >= STREAMED_BYTES};
  operation->mine = static_cast<const char*>(from);
  for (int i = 0; i < num_parts; ++i) {
    const int64_t* one = parts + 3 * i;
    operation->parts.push_back({one[0], one[1], reinterpret_cast<char*>(one[2])});
  }
  for (int rank = 0; rank < group->size; ++rank) {
    if (has_peer(*group, rank)) expect(*operation, rank, key | TO_ALL, whole_bytes);
  }
  return run(operation);
}

// Messages to and from single ranks: of each a peer, an address and a number of bytes.
XDS_EXPORT Operation* xds_transfer(Group* group, uint64_t key, int num_sends, const int64_t* sends, int num_receives,
                                   const int64_t* receives) {
  std::lock_guard<std::mutex> lock(process->mutex);
  if (!has_room(*process, num_sends)) return nullptr;
  Operation* operation = begin(group);
  for (int i = 0; i < num_sends; ++i) {
    const int64_t* one = sends + 3 * i;
    const void* from = reinterpret_cast<const void*>(one[1]);
    const int peer = static_cast<int>(one[0]);
    if (!post(*process, *group, key, peer, from, static_cast<uint64_t>(one[2]), true, &operation->own)) {
      operation->status = Status::no_memory;
    }
  }
  for (int i = 0; i < num_receives; ++i) {
    const int64_t* one = receives + 3 * i;
    const uint64_t size_bytes = static_cast<uint64_t>(one[2]);
    expect(*operation, static_cast<int>(one[0]), key, size_bytes);
    copy_to(*operation, 0, size_bytes, reinterpret_cast<void*>(one[1]));
  }
  return run(operation);
}

// Wait until `operation` is done, or at most `slice_ns`; also until a signal arrives. Returns its status.
XDS_EXPORT int xds_wait(Operation* operation, int64_t slice_ns, int64_t spin_ns, int yields) {
  Control& control = *process->control;
  const int64_t start = now_ns();
  if (operation->looked_ns == 0) operation->looked_ns = start;
  for (;;) {
    const uint32_t seen = control.events.load();
    {
      std::lock_guard<std::mutex> lock(process->mutex);
      if (operation->status == Status::pending) progress(*process, true);
      if (operation->status != Status::pending) return static_cast<int>(operation->status);
    }
    int64_t now = now_ns();
    while (control.events.load() == seen && now - start < spin_ns) {
      for (int i = 0; i < (yields ? 1 : 64) && control.events.load() == seen; ++i) pause_briefly(yields);
      now = now_ns();
    }
    bool has_signal = false;
    if (control.events.load() == seen) {
      {
        std::lock_guard<std::mutex> lock(process->mutex);
        if (has_read_all(*operation)) ask(*operation);
      }
      control.num_sleepers.fetch_add(1);
      errno = 0;
      sleep_on(control.events, seen, std::min(LOOK_NS, slice_ns));
      has_signal = errno == EINTR;
      control.num_sleepers.fetch_sub(1);
      now = now_ns();
    }
    if (now - operation->looked_ns >= LOOK_NS) {  // whatever else happens meanwhile
      std::lock_guard<std::mutex> lock(process->mutex);
      const Status status = status_of(*process, *operation);
      if (status != Status::pending) return static_cast<int>(status);
    }
    if (has_signal || now - start >= slice_ns) return static_cast<int>(Status::pending);
  }
}

// The peer that the status of `operation` is about, or for which it waits; -1: none.
XDS_EXPORT int xds_about(Operation* operation) {
  std::lock_guard<std::mutex> lock(process->mutex);
  return operation->about >= 0 ? operation->about : blocking_peer(*operation);
}

// Looks at the peers that it waits for.
XDS_EXPORT int xds_status(Operation* operation) {
  std::lock_guard<std::mutex> lock(process->mutex);
  return static_cast<int>(status_of(*process, *operation));
}

// Make what progress there is, and room for more messages.
XDS_EXPORT void xds_progress() {
  std::lock_guard<std::mutex> lock(process->mutex);
  progress(*process, true);
  if (now_ns() - process->swept_ns >= LOOK_NS) sweep(*process);
}

// End with an operation, also with a pending one.
XDS_EXPORT void xds_end(Operation* operation) {
  std::lock_guard<std::mutex> lock(process->mutex);
  end(*process, *operation);
}
