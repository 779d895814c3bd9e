// Posts entries, reads those of peers, and sees what is done.
#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "split.h"

namespace xds {
namespace {

#if defined(__x86_64__)
const Sums& sums() {
  static const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool middle = __builtin_cpu_supports("avx2");
  return wide ? avx512::sums : middle ? avx2::sums : baseline::sums;
}
#else
const Sums& sums() { return baseline::sums; }
#endif

// The caller's treatment of denormals, also in the helper thread.
class SameArithmetic {
 public:
#if defined(__x86_64__)
  explicit SameArithmetic(unsigned word) : kept_(_mm_getcsr()) { _mm_setcsr(word); }
  ~SameArithmetic() { _mm_setcsr(kept_); }

 private:
  unsigned kept_;
#else
  explicit SameArithmetic(unsigned) {}
#endif
};

Entry* free_entry(Control& control) {
  const uint32_t used = control.num_used.load();
  for (uint32_t i = 0; i < used; ++i) {
    if (control.entries[i].version.load() % 2 == 0) return &control.entries[i];
  }
  if (used == MAX_ENTRIES) return nullptr;
  control.num_used.store(used + 1);
  return &control.entries[used];
}

void withdraw(Process& process, const Posted& posted) {
  posted.entry->version.fetch_add(1);
  if (posted.staged >= 0) process.arena.give(static_cast<uint64_t>(posted.staged));
}

void withdraw_read(Process& process, std::vector<Posted>& all) {
  size_t kept = 0;
  for (const Posted& posted : all) {
    if (posted.entry->num_unread.load() == 0) {
      withdraw(process, posted);
    } else {
      all[kept++] = posted;
    }
  }
  all.resize(kept);
}

// What `peer` has posted for `reader` as (key, number); nullptr: not yet.
Entry* find(Control& control, const Group& group, const Read& read) {
  const uint32_t used = control.num_used.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < used; ++i) {
    Entry& entry = control.entries[i];
    const uint64_t version = entry.version.load(std::memory_order_acquire);
    if (version % 2 == 0) continue;
    const auto relaxed = std::memory_order_relaxed;
    const int64_t reader = entry.reader.load(relaxed);
    const bool matches = entry.key.load(relaxed) == read.key && entry.number.load(relaxed) == read.number &&
                         entry.group.load(relaxed) == group.id && (reader == ALL || reader == group.rank);
    if (!matches) continue;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.version.load(relaxed) == version) return &entry;  // else the owner has used it again meanwhile
  }
  return nullptr;
}

void mark_read(Group& group, int peer, Entry& entry) {
  entry.read_by[group.rank / 64].fetch_or(uint64_t{1} << (group.rank % 64));
  entry.num_unread.fetch_sub(1);
  notify(*group.peers[static_cast<size_t>(peer)]->control);
}

bool fails(Operation& operation, const Read& read, const Entry& entry) {
  if (entry.size_bytes.load() == read.posted_bytes) return false;
  operation.status = Status::size_differs;
  operation.about = read.peer;
  return true;
}

const char* place(const Group& group, const Read& read, const Entry& entry) {
  return group.peers[static_cast<size_t>(read.peer)]->data + entry.offset.load();
}

// All is posted: add it up, in rank order.
void add_up(Operation& operation, bool may_split) {
  Group& group = *operation.group;
  Entry* entries[MAX_RANKS];
  const char* from[MAX_RANKS];
  int count = 0;
  bool has_mine = false;
  for (size_t i = 0; i < operation.reads.size(); ++i) {
    const Read& read = operation.reads[i];
    entries[i] = find(*group.peers[static_cast<size_t>(read.peer)]->control, group, read);
    if (entries[i] == nullptr || fails(operation, read, *entries[i])) return;
    if (!has_mine && read.peer > group.rank) {
      from[count++] = operation.mine;
      has_mine = true;
    }
    from[count++] = place(group, read, *entries[i]);
  }
  if (!has_mine) from[count++] = operation.mine;
  const SameArithmetic same(operation.control_word);
  const void* parts[MAX_RANKS];
  Sum sum = operation.sum;
  sum.parts = parts;
  sum.num_parts = count;
  for (const Part& part : operation.parts) {
    sum.out = part.out;
    for (int r = 0; r < count; ++r) parts[r] = from[r] + part.begins * bytes_of(sum.part_kind);
    split(part.numel, may_split, [&](int64_t begin, int64_t end) { sums().run(sum, begin, end); });
  }
  operation.is_added = true;
  for (size_t i = 0; i < operation.reads.size(); ++i) {
    operation.reads[i].is_done = true;
    mark_read(group, operation.reads[i].peer, *entries[i]);
  }
}

// Copy what is posted already.
void copy(Operation& operation, bool may_split) {
  Group& group = *operation.group;
  size_t at = 0;
  for (size_t i = 0; i < operation.reads.size(); ++i) {
    Read& read = operation.reads[i];
    const size_t begin = at;
    while (at < operation.copies.size() && operation.copies[at].read == i) ++at;
    if (read.is_done) continue;
    Entry* entry = find(*group.peers[static_cast<size_t>(read.peer)]->control, group, read);
    if (entry == nullptr) continue;
    if (fails(operation, read, *entry)) return;
    const char* from = place(group, read, *entry);
    for (size_t k = begin; k < at; ++k) {
      const Copy& one = operation.copies[k];
      copy_bytes(one.into, from + one.skip_bytes, one.size_bytes, may_split);
    }
    read.is_done = true;
    mark_read(group, read.peer, *entry);
  }
}

bool has_read_all(const Operation& operation) {
  for (const Read& read : operation.reads) {
    if (!read.is_done) return false;
  }
  return true;
}

// Its own entries that are copies go on without it.
void leave_copies(Process& process, Operation& operation) {
  size_t kept = 0;
  for (const Posted& posted : operation.own) {
    if (posted.staged >= 0) {
      process.unread.push_back(posted);
    } else {
      operation.own[kept++] = posted;
    }
  }
  operation.own.resize(kept);
}

void advance(Process& process, Operation& operation, bool may_split) {
  if (operation.parts.empty()) {
    copy(operation, may_split);
  } else if (!operation.is_added) {
    add_up(operation, may_split);
  }
  withdraw_read(process, operation.own);
  if (operation.status != Status::pending || !has_read_all(operation)) return;
  leave_copies(process, operation);
  if (operation.own.empty()) operation.status = Status::done;
}

bool has_ended(const Peer& peer) {
  pollfd asked = {peer.pidfd, POLLIN, 0};
  return peer.pidfd >= 0 && ::poll(&asked, 1, 0) == 1;
}

// Rank `rank` will not read any more.
void forgive(int rank, const std::vector<Posted>& own) {
  for (const Posted& posted : own) {
    const int64_t reader = posted.entry->reader.load();
    const uint64_t bit = uint64_t{1} << (rank % 64);
    if (reader != ALL && reader != rank) continue;
    if ((posted.entry->read_by[rank / 64].fetch_or(bit) & bit) == 0) posted.entry->num_unread.fetch_sub(1);
  }
}

bool has_left(const Peer& peer, uint64_t group) {
  for (const auto& left : peer.control->left) {
    if (left.load() == group) return true;
  }
  return false;
}

}  // namespace

bool has_room(Process& process, int count) {
  withdraw_read(process, process.unread);
  const uint32_t used = process.control->num_used.load();
  int free = MAX_ENTRIES - static_cast<int>(used);
  for (uint32_t i = 0; i < used && free < count; ++i) {
    free += process.control->entries[i].version.load() % 2 == 0;
  }
  return free >= count;
}

bool post(Process& process, Group& group, uint64_t key, int reader, const void* from, uint64_t size_bytes,
          bool copies, std::vector<Posted>* own) {
  Entry* entry = free_entry(*process.control);
  int64_t staged = -1;
  if (copies || !process.owns(from)) {
    staged = process.arena.take(size_bytes);
    if (staged < 0) return false;
    copy_bytes(process.data + staged, static_cast<const char*>(from), size_bytes, true);
  }
  const int64_t offset = staged >= 0 ? staged : static_cast<const char*>(from) - process.data;
  entry->group.store(group.id);
  entry->key.store(key);
  entry->number.store(group.posted[{key, reader}]++);
  entry->offset.store(static_cast<uint64_t>(offset));
  entry->size_bytes.store(size_bytes);
  entry->reader.store(reader);
  uint32_t num_readers = 1;
  if (reader == ALL) {
    num_readers = 0;
    for (const Peer* peer : group.peers) num_readers += peer != nullptr;
  }
  entry->num_unread.store(num_readers);
  for (auto& word : entry->read_by) word.store(0);
  entry->version.fetch_add(1);
  own->push_back({entry, staged});
  for (int rank = 0; rank < group.size; ++rank) {
    Peer* peer = group.peers[static_cast<size_t>(rank)];
    if (peer != nullptr && (reader == ALL || reader == rank)) notify(*peer->control);
  }
  return true;
}

void progress(Process& process, bool may_split) {
  withdraw_read(process, process.unread);
  if (process.is_stopped) return;
  for (auto it = process.running.begin(); it != process.running.end();) {
    Operation& operation = **it;
    advance(process, operation, may_split);
    it = operation.status == Status::pending ? std::next(it) : process.running.erase(it);
  }
}

// The first peer that `operation` waits for: one that has posted nothing yet, or one that has not read.
int blocking_peer(Operation& operation, bool* is_unread) {
  *is_unread = false;
  for (const Read& read : operation.reads) {
    if (!read.is_done) return read.peer;
  }
  *is_unread = true;
  const Group& group = *operation.group;
  for (const Posted& posted : operation.own) {
    const int64_t reader = posted.entry->reader.load();
    if (reader != ALL) return static_cast<int>(reader);
    for (int rank = 0; rank < group.size; ++rank) {
      const bool reads = group.peers[static_cast<size_t>(rank)] != nullptr;
      if (reads && (posted.entry->read_by[rank / 64].load() >> (rank % 64)) % 2 == 0) return rank;
    }
  }
  return -1;
}

// As `operation.status`, with a look at the peers that it waits for. What they posted before they ended counts, and
// a process that has ended reads nothing more.
Status status_of(Process& process, Operation& operation) {
  if (operation.status != Status::pending) return operation.status;
  const Group& group = *operation.group;
  Status found[MAX_RANKS];
  for (int rank = 0; rank < group.size; ++rank) {
    const Peer* peer = group.peers[static_cast<size_t>(rank)];
    found[rank] = Status::pending;
    if (peer == nullptr) continue;
    found[rank] = has_ended(*peer) ? Status::ended : has_left(*peer, group.id) ? Status::left : Status::pending;
    if (found[rank] == Status::ended) forgive(rank, operation.own);
  }
  progress(process, true);  // a peer may have posted between the last look and its end
  bool is_unread = false;
  const int first = operation.status == Status::pending ? blocking_peer(operation, &is_unread) : -1;
  if (first < 0) return operation.status;
  int about = first;
  for (const Read& read : operation.reads) {
    if (!read.is_done && found[about] == Status::pending) about = read.peer;
  }
  if (found[about] == Status::pending) return Status::pending;
  operation.status = found[about];
  operation.about = about;
  process.running.remove(&operation);
  return operation.status;
}

}  // namespace xds
