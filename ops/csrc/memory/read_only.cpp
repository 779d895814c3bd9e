// Memory that a process may only read: a write to it ends the process, and a message says what it was.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#define XDS_EXPORT extern "C" __attribute__((visibility("default")))

namespace xds {
namespace {

// Never freed, as the handler of a signal may read it at any time. A range that is over is empty, and used again.
struct Range {
  std::atomic<uintptr_t> start{0}, stop{0};
  std::atomic<const char*> text{nullptr};
  Range* next = nullptr;
};

std::atomic<Range*> ranges{nullptr};
std::mutex adding;
struct sigaction before;
std::atomic<int> num_faults{0};

// Write a message where the address is in a range. Then the instruction is run again, with the handler from before.
// That one may call this one again, if it is newer: the second time the process ends.
void on_fault(int number, siginfo_t* info, void*) {
  if (num_faults.fetch_add(1) > 0) {
    signal(number, SIG_DFL);
  } else {
    sigaction(number, &before, nullptr);
  }
  if (info->si_code <= 0) {  // a process has sent it: no instruction would raise it again
    raise(number);
    return;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Range* range = ranges.load(); range != nullptr; range = range->next) {
    const char* text = range->text.load();
    if (at < range->start.load() || at >= range->stop.load() || text == nullptr) continue;
    const ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written;
    break;
  }
}

// Scripts may change the handler at any time: it is set again for each range.
void handle_faults() {
  struct sigaction action = {}, now = {};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
  before = now;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace
}  // namespace xds

using namespace xds;

// Print `text` if this process writes to `size_bytes` from `at` on, which it can only read.
XDS_EXPORT void xds_explain_writes(void* at, uint64_t size_bytes, const char* text) {
  std::lock_guard<std::mutex> lock(adding);
  handle_faults();
  Range* range = ranges.load();
  while (range != nullptr && range->text.load() != nullptr) range = range->next;
  const bool is_new = range == nullptr;
  if (is_new) range = new Range();
  const uintptr_t start = reinterpret_cast<uintptr_t>(at);
  range->start = start;
  range->stop = start + size_bytes;
  range->text = strdup(text);
  if (!is_new) return;
  range->next = ranges.load();
  ranges = range;
}

// The range that begins at `at` is about to be unmapped.
XDS_EXPORT void xds_forget_writes(void* at) {
  std::lock_guard<std::mutex> lock(adding);
  const uintptr_t start = reinterpret_cast<uintptr_t>(at);
  for (Range* range = ranges.load(); range != nullptr; range = range->next) {
    if (range->start.load() != start) continue;
    range->start = 0;
    range->stop = 0;
    range->text = nullptr;  // its bytes stay: a handler may be reading them
    return;
  }
}
