// This process's segment, the segments of its peers, and the operations in flight.
//
//   operation   reads from peers, done as soon as the peers have posted what is read
//               entries of its own, which peers read
//
// Every call makes what progress it can for all operations, and so does a helper thread when a peer waits for this
// process. So a process that computes does not hold up its peers, whatever the order in which they wait.
#pragma once

#include <list>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "arena.h"
#include "segment.h"
#include "../cpu/sums.h"

namespace xds {

struct Peer {
  Control* control;
  const char* data;
  uint64_t data_bytes;
  int pid, pidfd;  // pidfd: readable once the process has ended; -1: this system has none
  int num_uses;  // by groups, and by one that is being opened
};

struct Group {
  uint64_t id;
  int rank, size;
  std::vector<Peer*> peers;  // by rank; nullptr: this rank, or one on another machine
  std::map<std::tuple<uint64_t, int>, uint64_t> posted, expected;  // (key, peer) -> how many
  bool is_left = false;  // its operations have failed
  int num_operations = 0;  // that have not ended
};

enum class Status : int { done = 0, pending = 1, ended = 2, left = 3, size_differs = 4, no_memory = 5 };

// What `peer` posts as (key, number).
struct Read {
  int peer;
  uint64_t key, number, posted_bytes;
  bool is_done;
};

// `size_bytes` from `skip_bytes` on of what is posted for read `read`, into `into`.
struct Copy {
  size_t read;
  uint64_t skip_bytes, size_bytes;
  char* into;
};

// Elements [begins, begins + numel) of what every rank posts, added up into `out`.
struct Part {
  int64_t begins, numel;
  char* out;
};

struct Posted {
  Entry* entry;
  int64_t staged;  // the block with the copy that was posted; -1: the memory itself
  Group* group;
};

struct Operation {
  Group* group;
  std::vector<Read> reads;
  std::vector<Posted> own;
  std::vector<Copy> copies;  // in the order of `reads`
  std::vector<Part> parts;  // with any: all reads at once, and `mine`, are added as `sum` says
  bool is_added = false;
  Sum sum = {};
  const char* mine = nullptr;
  Status status = Status::pending;
  int about = -1;  // the peer that `status` is about
  unsigned control_word = 0;  // of floating point, in the thread that began
  int64_t looked_ns = 0;  // the last look at whether its peers live
};

struct Process {
  Process(int fd, Control* control, char* data, uint64_t size_bytes, uint64_t reserve_from)
      : fd(fd), control(control), data(data), size_bytes(size_bytes), reserve_from(reserve_from), arena(size_bytes) {}

  bool owns(const void* at) const { return at >= data && at < data + size_bytes; }

  int fd;
  Control* control;
  char* data;
  uint64_t size_bytes;
  uint64_t reserve_from;  // of the data in a file whose folder limits it; 0: pages need not be reserved
  std::mutex mutex;  // guards all below
  Arena arena;
  std::list<Operation*> running;
  std::vector<Posted> unread;  // entries whose operations have ended: copies, and what was withdrawn
  uint64_t taken[MAX_ENTRIES / 64] = {};  // bits of the entries in use
  int num_taken = 0;
  std::vector<Peer*> peers;
  std::vector<Group*> closed;  // groups of which entries are unread
  int64_t swept_ns = 0;
  bool is_stopped = false;
};

// For all of these the caller holds the mutex. has_room: `count` more entries can be posted. post: false where there
// is no memory for the copy.
bool has_room(Process& process, int count);
bool post(Process& process, Group& group, uint64_t key, int reader, const void* from, uint64_t size_bytes,
          bool copies, std::vector<Posted>* own);
void progress(Process& process, bool may_split);
Status status_of(Process& process, Operation& operation);
bool has_read_all(const Operation& operation);
int blocking_peer(const Operation& operation);
int first_reader(const Posted& posted);
void leave(Process& process, Group& group);
void end(Process& process, Operation& operation);
void sweep(Process& process);
void release(Process& process, Peer* peer);

}  // namespace xds
