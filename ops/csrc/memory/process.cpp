// Posts entries, reads those of peers, and sees what is done.
#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../cpu/isa.h"
#include "split.h"

namespace xds {
namespace {

const Sums& sums() {
#if defined(__x86_64__)
  bool is_known;
  const Isa isa = selected(&is_known);
  return isa == Isa::avx512 ? avx512::sums : isa == Isa::avx2 ? avx2::sums : baseline::sums;
#else
  return baseline::sums;
#endif
}

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

// The first entry that is not in use, so that readers look through few.
Entry* take_entry(Process& process) {
  int word = 0;
  while (process.taken[word] == ~uint64_t{0}) ++word;
  const int at = 64 * word + __builtin_ctzll(~process.taken[word]);
  process.taken[word] |= uint64_t{1} << (at % 64);
  ++process.num_taken;
  Control& control = *process.control;
  if (control.num_used.load() < static_cast<uint32_t>(at) + 1) control.num_used.store(static_cast<uint32_t>(at) + 1);
  return &control.entries[at];
}

void give_entry(Process& process, const Entry& entry) {
  const int at = static_cast<int>(&entry - process.control->entries);
  process.taken[at / 64] &= ~(uint64_t{1} << (at % 64));
  --process.num_taken;
  int word = at / 64;
  if (process.control->num_used.load() != static_cast<uint32_t>(at) + 1) return;
  while (word > 0 && process.taken[word] == 0) --word;
  const int used = process.taken[word] ? 64 * word + 64 - __builtin_clzll(process.taken[word]) : 0;
  process.control->num_used.store(static_cast<uint32_t>(used));
}

bool is_posted(const Entry& entry) { return entry.version.load() % 2 != 0; }

bool is_read(const Entry& entry) {
  for (const auto& word : entry.unread_by) {
    if (word.load() != 0) return false;
  }
  return true;
}

void withdraw_read(Process& process, std::vector<Posted>& all) {
  size_t kept = 0;
  for (const Posted& posted : all) {
    if (!is_read(*posted.entry)) {
      all[kept++] = posted;
      continue;
    }
    if (is_posted(*posted.entry)) posted.entry->version.fetch_add(1);
    if (posted.staged >= 0) process.arena.give(static_cast<uint64_t>(posted.staged));
    give_entry(process, *posted.entry);
  }
  all.resize(kept);
}

// An entry of a peer, and its version when it was found.
struct Found {
  Entry* entry;
  uint64_t version;
};

// What a peer has posted for this rank as (key, number); nullptr: not yet.
Found find(const Group& group, const Read& read) {
  Control& control = *group.peers[static_cast<size_t>(read.peer)]->control;
  const uint32_t used = std::min<uint32_t>(control.num_used.load(std::memory_order_acquire), MAX_ENTRIES);
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
    if (entry.version.load(relaxed) == version) return {&entry, version};  // else it was used again meanwhile
  }
  return {nullptr, 0};
}

uint64_t bit_of(int rank) { return uint64_t{1} << (rank % 64); }

// Its bytes are read. The operation fails if the peer has withdrawn them before that.
void end_read(Operation& operation, Read& read, const Found& found) {
  Group& group = *operation.group;
  std::atomic_thread_fence(std::memory_order_acquire);
  const bool is_whole = found.entry->version.load() == found.version;
  found.entry->unread_by[group.rank / 64].fetch_and(~bit_of(group.rank));
  notify(*group.peers[static_cast<size_t>(read.peer)]->control);
  read.is_done = true;
  if (is_whole || operation.status != Status::pending) return;
  operation.status = Status::left;
  operation.about = read.peer;
}

bool fails(Operation& operation, const Read& read, const Found& found) {
  if (found.entry->size_bytes.load() == read.posted_bytes) return false;
  operation.status = Status::size_differs;
  operation.about = read.peer;
  return true;
}

const char* place(const Group& group, const Read& read, const Found& found) {
  return group.peers[static_cast<size_t>(read.peer)]->data + found.entry->offset.load();
}

// All is posted: add it up, in rank order.
void add_up(Operation& operation, bool may_split) {
  Group& group = *operation.group;
  Found entries[MAX_RANKS];
  const char* from[MAX_RANKS];
  int count = 0;
  bool has_mine = false;
  for (size_t i = 0; i < operation.reads.size(); ++i) {
    const Read& read = operation.reads[i];
    entries[i] = find(group, read);
    if (entries[i].entry == nullptr || fails(operation, read, entries[i])) return;
    if (!has_mine && read.peer > group.rank) {
      from[count++] = operation.mine;
      has_mine = true;
    }
    from[count++] = place(group, read, entries[i]);
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
  for (size_t i = 0; i < operation.reads.size(); ++i) end_read(operation, operation.reads[i], entries[i]);
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
    const Found found = find(group, read);
    if (found.entry == nullptr) continue;
    if (fails(operation, read, found)) return;
    const char* from = place(group, read, found);
    for (size_t k = begin; k < at; ++k) {
      const Copy& one = operation.copies[k];
      copy_bytes(one.into, from + one.skip_bytes, one.size_bytes, may_split);
    }
    end_read(operation, read, found);
    if (operation.status != Status::pending) return;
  }
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
  if (peer.pidfd < 0) return kill(peer.pid, 0) != 0 && errno == ESRCH;
  pollfd asked = {peer.pidfd, POLLIN, 0};
  return ::poll(&asked, 1, 0) == 1;
}

bool has_left(const Peer& peer, uint64_t group) {
  for (const auto& left : peer.control->left) {
    if (left.load() == group) return true;
  }
  return false;
}

// Rank `rank` will not read any more.
void clear_unread(int rank, const std::vector<Posted>& own) {
  for (const Posted& posted : own) posted.entry->unread_by[rank / 64].fetch_and(~bit_of(rank));
}

// What `peer` posted, or nothing: is it there?
bool is_there(const Operation& operation, const Read& read) {
  return read.is_done || find(*operation.group, read).entry != nullptr;
}

}  // namespace

bool has_read_all(const Operation& operation) {
  for (const Read& read : operation.reads) {
    if (!read.is_done) return false;
  }
  return true;
}

bool has_room(Process& process, int count) {
  if (process.num_taken + count > MAX_ENTRIES / 2) withdraw_read(process, process.unread);
  return process.num_taken + count <= MAX_ENTRIES;
}

namespace {

// A block for a copy; -1: there is no room.
int64_t stage(Process& process, uint64_t size_bytes) {
  const int64_t at = process.arena.take(size_bytes);
  if (at < 0 || process.reserve_from == 0) return at;
  const auto begin = static_cast<off_t>(process.reserve_from) + at;  // the first write would end the process
  if (fallocate(process.fd, 0, begin, static_cast<off_t>(std::max<uint64_t>(size_bytes, 1))) == 0) return at;
  process.arena.give(static_cast<uint64_t>(at));
  return -1;
}

}  // namespace

bool post(Process& process, Group& group, uint64_t key, int reader, const void* from, uint64_t size_bytes,
          bool copies, std::vector<Posted>* own) {
  int64_t staged = -1;
  if (copies || !process.owns(from)) {
    staged = stage(process, size_bytes);
    if (staged < 0) return false;
    copy_bytes(process.data + staged, static_cast<const char*>(from), size_bytes, true);
  }
  const int64_t offset = staged >= 0 ? staged : static_cast<const char*>(from) - process.data;
  Entry* entry = take_entry(process);
  entry->group.store(group.id);
  entry->key.store(key);
  entry->number.store(group.posted[{key, reader}]++);
  entry->offset.store(static_cast<uint64_t>(offset));
  entry->size_bytes.store(size_bytes);
  entry->reader.store(reader);
  uint64_t unread_by[MAX_RANKS / 64] = {};
  for (int rank = 0; rank < group.size; ++rank) {
    const bool reads = group.peers[static_cast<size_t>(rank)] != nullptr && (reader == ALL || reader == rank);
    if (reads) unread_by[rank / 64] |= bit_of(rank);
  }
  for (int word = 0; word < MAX_RANKS / 64; ++word) entry->unread_by[word].store(unread_by[word]);
  entry->version.fetch_add(1);
  own->push_back({entry, staged, &group});
  for (int rank = 0; rank < group.size; ++rank) {
    Peer* peer = group.peers[static_cast<size_t>(rank)];
    if (peer != nullptr && (reader == ALL || reader == rank)) notify(*peer->control);
  }
  return true;
}

void progress(Process& process, bool may_split) {
  withdraw_read(process, process.unread);
  for (auto it = process.running.begin(); it != process.running.end();) {
    Operation& operation = **it;
    advance(process, operation, may_split);
    it = operation.status == Status::pending ? std::next(it) : process.running.erase(it);
  }
}

// The rank that has not read `posted` yet; -1: none.
int first_reader(const Posted& posted) {
  for (int word = 0; word < MAX_RANKS / 64; ++word) {
    const uint64_t unread = posted.entry->unread_by[word].load();
    if (unread != 0) return 64 * word + __builtin_ctzll(unread);
  }
  return -1;
}

// The first peer that `operation` waits for: one that has posted nothing yet, or one that has not read.
int blocking_peer(const Operation& operation) {
  int posted_already = -1;
  for (const Read& read : operation.reads) {
    if (!is_there(operation, read)) return read.peer;
    if (!read.is_done) posted_already = read.peer;
  }
  if (posted_already >= 0) return posted_already;
  for (const Posted& posted : operation.own) {
    const int reader = first_reader(posted);
    if (reader >= 0) return reader;
  }
  return -1;
}

// As `operation.status`, with a look at the peers that it waits for. What they posted before they ended counts, and
// a process that has ended reads nothing more.
Status status_of(Process& process, Operation& operation) {
  operation.looked_ns = now_ns();
  if (operation.status != Status::pending) return operation.status;
  const Group& group = *operation.group;
  Status found[MAX_RANKS];
  for (int rank = 0; rank < group.size; ++rank) {
    const Peer* peer = group.peers[static_cast<size_t>(rank)];
    found[rank] = Status::pending;
    if (peer == nullptr) continue;
    found[rank] = has_ended(*peer) ? Status::ended : has_left(*peer, group.id) ? Status::left : Status::pending;
    if (found[rank] == Status::ended) clear_unread(rank, operation.own);
  }
  progress(process, true);  // a peer may have posted between the last look and its end
  if (operation.status != Status::pending) return operation.status;
  int about = -1;
  const auto blame = [&](int rank) {  // an end explains why others have left
    if (found[rank] == Status::ended || (found[rank] == Status::left && about < 0)) about = rank;
  };
  for (const Read& read : operation.reads) {
    if (!is_there(operation, read)) blame(read.peer);
  }
  if (has_read_all(operation)) {
    for (const Posted& posted : operation.own) {
      const int reader = first_reader(posted);
      if (reader >= 0) blame(reader);
    }
  }
  if (about < 0) return Status::pending;
  operation.status = found[about];
  operation.about = about;
  process.running.remove(&operation);
  return operation.status;
}

// Peers that wait for this rank in `group` fail, and so do its operations.
void leave(Process& process, Group& group) {
  group.is_left = true;
  Control& control = *process.control;
  control.left[control.num_left.fetch_add(1) % MAX_LEFT].store(group.id);
  for (auto it = process.running.begin(); it != process.running.end();) {
    if ((*it)->group == &group) (*it)->status = Status::left;
    it = (*it)->group == &group ? process.running.erase(it) : std::next(it);
  }
  for (Peer* peer : group.peers) {
    if (peer != nullptr) notify(*peer->control);
  }
}

// The caller may write to its memory, or free it: what was not read by all can not be read any more. Copies can.
void end(Process& process, Operation& operation) {
  process.running.remove(&operation);
  for (const Posted& posted : operation.own) {
    if (posted.staged < 0 && is_posted(*posted.entry)) posted.entry->version.fetch_add(1);
    process.unread.push_back(posted);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  --operation.group->num_operations;
  delete &operation;
}

// Forget what was posted for peers that will not read it, then groups that are closed.
void sweep(Process& process) {
  process.swept_ns = now_ns();
  for (const Posted& posted : process.unread) {
    for (int rank = 0; rank < posted.group->size; ++rank) {
      if ((posted.entry->unread_by[rank / 64].load() & bit_of(rank)) == 0) continue;
      const Peer& peer = *posted.group->peers[static_cast<size_t>(rank)];
      if (has_left(peer, posted.group->id) || has_ended(peer)) clear_unread(rank, {posted});
    }
  }
  withdraw_read(process, process.unread);
  const auto is_over = [&](Group* group) {
    if (group->num_operations > 0) return false;  // handles may be collected after their group
    for (const Posted& posted : process.unread) {
      if (posted.group == group) return false;
    }
    for (Peer* peer : group->peers) release(process, peer);
    delete group;
    return true;
  };
  process.closed.erase(std::remove_if(process.closed.begin(), process.closed.end(), is_over), process.closed.end());
}

// One use of `peer` less. Without any its memory is unmapped.
void release(Process& process, Peer* peer) {
  if (peer == nullptr || --peer->num_uses > 0) return;
  process.peers.erase(std::find(process.peers.begin(), process.peers.end(), peer));
  munmap(const_cast<char*>(peer->data), peer->data_bytes);
  munmap(peer->control, Arena::rounded(sizeof(Control)));
  if (peer->pidfd >= 0) close(peer->pidfd);
  delete peer;
}

}  // namespace xds
