// The layout of a segment: the memory of one process that other processes of its machine map.
//
//   control   entries: "bytes [offset, offset + size) of my data are ready"      mapped for writing by peers
//   data      what is sent, and tensors that are allocated here                  mapped for reading by peers
//
// Only the owner posts entries. A reader marks an entry as read, and changes the owner's event counter, on which
// the owner sleeps. So no lock is shared between processes, and a process that dies holds none.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace xds {

constexpr uint64_t MAGIC = 0x3147455353445802;  // with the version of this layout
constexpr int MAX_ENTRIES = 1024;
constexpr int MAX_RANKS = 256;  // of one group
constexpr int MAX_LEFT = 64;
constexpr int32_t ALL = -1;

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "futex needs a plain word");

// version is odd while the entry is posted. A reader compares it before and after it reads the other fields, and
// after it has read the bytes: an owner that gave up waiting withdraws the entry, and its memory changes. The owner
// uses an entry again when each reader has read it, has ended, or has left the group.
struct alignas(128) Entry {
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> group, key, number;
  std::atomic<uint64_t> offset, size_bytes;
  std::atomic<int64_t> reader;  // its rank in the group, or ALL
  std::atomic<uint64_t> unread_by[MAX_RANKS / 64];  // bits of the ranks that have not read it yet
};

struct Control {
  uint64_t magic;
  uint64_t token[2];
  alignas(128) Word events;  // a peer has posted or read something; the owner sleeps on it
  Word num_sleepers;
  alignas(128) Word asked;  // a peer waits for the owner to read; its helper sleeps on it
  alignas(128) Word num_used;  // entries from here on are not posted
  Word num_left;
  std::atomic<uint64_t> left[MAX_LEFT];  // the last groups in which the owner does not take part any more
  Entry entries[MAX_ENTRIES];
};

inline int64_t now_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return int64_t{at.tv_sec} * 1000000000 + at.tv_nsec;
}

// Sleep while `word` is `value`. Returns early on a signal.
inline void sleep_on(Word& word, uint32_t value, int64_t at_most_ns) {
  timespec limit = {static_cast<time_t>(at_most_ns / 1000000000), static_cast<long>(at_most_ns % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, at_most_ns < 0 ? nullptr : &limit,
          nullptr, 0);
}

inline void wake(Word& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Tell the owner that something has changed. The system is called only if it sleeps.
inline void notify(Control& control) {
  control.events.fetch_add(1);
  if (control.num_sleepers.load() != 0) wake(control.events);
}

}  // namespace xds
