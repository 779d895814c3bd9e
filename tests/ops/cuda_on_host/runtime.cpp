// Launches, barriers and accesses of kernels on the host: see cuda_runtime.h. This file is compiled without -fsanitize.
//
// A block's threads are fibers of one thread. One runs until it reaches a barrier or its end, then the next. Blocks run
// one after another. What another order could change is a fault, and a fault fails the launch:
//
// - two threads use a byte, one of them writes it, and no __syncthreads is between them, in a warp no __syncwarp. A
//   shuffle orders no memory, and nothing orders two blocks of a launch;
// - a thread reads shared memory that its block has not written;
// - a barrier or a shuffle that some threads never reach, and a shuffle in which not all 32 lanes take part;
// - a grid or a block of a size that CUDA refuses.
#include "cuda_runtime.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>
#include <ucontext.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace host {

Indices here;
int multiprocessors = 3;
int64_t questions = 0;

namespace {

constexpr size_t kStack = 64 << 10;
constexpr unsigned kMostThreads = 1024, kMostBlocks = 0x7fffffff;
constexpr uintptr_t kPage = 4096;

struct Fiber {
  ucontext_t context = {};
  int64_t block_barriers = 0, warp_barriers = 0, shuffles = 0;
  bool is_done = false;
};

struct Access {
  int64_t block = -1;
  int16_t thread = -1, warp = -1;  // -1: several
  int32_t epoch = 0, warp_epoch = 0;  // how many barriers the thread had passed
};

struct Byte {
  Access written, read;
  bool is_read_by_blocks = false;  // by several
};

struct Page {
  Byte bytes[kPage];
};

int64_t launches = 0;
std::vector<int64_t> blocks_to_run;  // none: all
bool is_checking = true, is_in_kernel = false;
std::string fault, message;

std::vector<Fiber> fibers;
std::unique_ptr<char[]> stacks;
ucontext_t scheduler;
unsigned running = 0;
const std::function<void()>* body = nullptr;
uint64_t exchanged[kMostThreads];

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
std::vector<uintptr_t> shared_pages;
uintptr_t last_number = 0;
Page* last_page = nullptr;
uintptr_t data_start = 0, data_stop = 0;  // of the kernels' library: shared memory is static in it

void set_fault(const std::string& text) {
  if (fault.empty()) fault = text;
}

std::string where() {
  return "thread " + std::to_string(running) + " of block " + std::to_string(here.block.x);
}

void begin() {
  (*body)();
  fibers[running].is_done = true;
  swapcontext(&fibers[running].context, &scheduler);
}

void step_aside() { swapcontext(&fibers[running].context, &scheduler); }

int find_data(dl_phdr_info* info, size_t, void*) {
  const auto mine = reinterpret_cast<uintptr_t>(&find_data);
  uintptr_t low = 0, high = 0;
  bool is_mine = false;
  for (int at = 0; at < info->dlpi_phnum; ++at) {
    const auto& part = info->dlpi_phdr[at];
    if (part.p_type != PT_LOAD) continue;
    const uintptr_t start = info->dlpi_addr + part.p_vaddr, stop = start + part.p_memsz;
    is_mine = is_mine || (start <= mine && mine < stop);
    if (part.p_flags & PF_W) low = start, high = stop;
  }
  if (is_mine) data_start = low, data_stop = high;
  return is_mine;
}

Page& page_of(uintptr_t number, bool is_shared) {
  if (number == last_number && last_page != nullptr) return *last_page;
  auto& found = pages[number];
  if (!found) {
    found = std::make_unique<Page>();
    if (is_shared) shared_pages.push_back(number);
  }
  last_number = number;
  last_page = found.get();
  return *found;
}

void forget(const std::vector<uintptr_t>& numbers) {
  for (uintptr_t number : numbers) pages.erase(number);
  last_page = nullptr;
}

// Whether `before`, of another thread, comes before what this thread does now.
bool is_ordered(const Access& before) {
  if (before.block < 0) return true;
  if (before.block != here.block.x) return false;
  const Fiber& fiber = fibers[running];
  return before.thread == static_cast<int>(running) || before.epoch < fiber.block_barriers ||
         (before.warp == static_cast<int>(running / 32) && before.warp_epoch < fiber.warp_barriers);
}

void check(uintptr_t address, size_t size, bool writes) {
  const auto stack = reinterpret_cast<uintptr_t>(stacks.get());
  if (address >= stack && address < stack + fibers.size() * kStack) return;
  const auto indices = reinterpret_cast<uintptr_t>(&here);
  if (address >= indices && address < indices + sizeof(here)) return;
  const bool is_shared = address >= data_start && address < data_stop;
  const Fiber& fiber = fibers[running];
  const Access now = {
      here.block.x, static_cast<int16_t>(running), static_cast<int16_t>(running / 32),
      static_cast<int32_t>(fiber.block_barriers), static_cast<int32_t>(fiber.warp_barriers)};
  for (uintptr_t at = address; at < address + size; ++at) {
    Byte& byte = page_of(at / kPage, is_shared).bytes[at % kPage];
    const std::string memory = is_shared ? " shared memory " : " memory ";
    if (!is_ordered(byte.written))
      set_fault(where() + (writes ? " writes" : " reads") + memory + "that thread " +
                std::to_string(byte.written.thread) + " of block " + std::to_string(byte.written.block) +
                " wrote, without a barrier between them");
    if (is_shared && !writes && byte.written.block < 0)
      set_fault(where() + " reads shared memory that its block has not written");
    if (writes) {
      if (byte.is_read_by_blocks || !is_ordered(byte.read))
        set_fault(where() + " writes" + memory + "that another thread reads, without a barrier between them");
      byte.written = now;
    } else {
      byte.is_read_by_blocks = byte.is_read_by_blocks || (byte.read.block >= 0 && byte.read.block != now.block);
      const Access before = byte.read;
      byte.read = now;
      if (before.block == now.block && before.epoch == now.epoch) {
        if (before.warp != now.warp) byte.read.warp = -1;
        if (before.thread != now.thread && (before.warp != now.warp || before.warp_epoch == now.warp_epoch))
          byte.read.thread = -1;
      }
    }
  }
}

void run_block(unsigned threads) {
  forget(shared_pages);
  shared_pages.clear();
  for (unsigned at = 0; at < threads; ++at) {
    Fiber& fiber = fibers[at];
    fiber.block_barriers = fiber.warp_barriers = fiber.shuffles = 0;
    fiber.is_done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.get() + at * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, begin, 0);
  }
  // what is left after a fault does not matter: its fibers are not run again
  for (bool is_any = true; is_any && fault.empty();) {
    is_any = false;
    for (unsigned at = 0; at < threads; ++at) {
      if (fibers[at].is_done) continue;
      is_any = true;
      running = at;
      here.thread = dim3(at);
      swapcontext(&scheduler, &fibers[at].context);
    }
  }
}

void wait(int64_t Fiber::*count, unsigned first, unsigned stop, bool needs_all) {
  const int64_t mine = ++(fibers[running].*count);
  const unsigned self = running;
  step_aside();
  for (int64_t tries = 0;; ++tries) {
    unsigned at = first;
    while (at < stop && (fibers[at].*count >= mine || (fibers[at].is_done && !needs_all))) ++at;
    if (at == stop) return;
    if (fibers[at].is_done || tries > 10'000)
      set_fault("thread " + std::to_string(at) + " of block " + std::to_string(here.block.x) + " never reaches a " +
                (needs_all ? "shuffle" : "barrier") + " of thread " + std::to_string(self));
    step_aside();
  }
}

}  // namespace

unsigned lane() { return running % 32; }

uint64_t exchange(unsigned mask, uint64_t bits, unsigned from_lane) {
  const unsigned first = running / 32 * 32;
  if (mask != 0xffffffffu) set_fault(where() + " shuffles with a mask that is not of 32 lanes");
  exchanged[running] = bits;
  wait(&Fiber::shuffles, first, first + 32, true);
  const uint64_t theirs = exchanged[first + from_lane];
  wait(&Fiber::shuffles, first, first + 32, true);
  return theirs;
}

cudaError_t run(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& call) {
  ++launches;
  fault.clear();
  const unsigned blocks = config.gridDim.x, threads = config.blockDim.x;
  if (blocks == 0 || blocks > kMostBlocks || threads == 0 || threads > kMostThreads || threads % 32 != 0)
    set_fault("a grid of " + std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads");
  if (data_start == 0) dl_iterate_phdr(&find_data, nullptr);
  if (fibers.size() < threads) {
    fibers = std::vector<Fiber>(threads);
    stacks.reset(new char[threads * kStack]);
  }
  here.grid = config.gridDim;
  here.threads = config.blockDim;
  body = &call;
  is_in_kernel = true;
  const int64_t count = blocks_to_run.empty() ? blocks : static_cast<int64_t>(blocks_to_run.size());
  for (int64_t at = 0; at < count && fault.empty(); ++at) {
    const int64_t block = blocks_to_run.empty() ? at : blocks_to_run[at];
    if (block >= blocks) continue;
    here.block = dim3(static_cast<unsigned>(block));
    run_block(threads);
  }
  is_in_kernel = false;
  pages.clear();
  shared_pages.clear();
  last_page = nullptr;
  if (fault.empty()) return cudaSuccess;
  Dl_info info = {};
  const char* name = dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : "a kernel";
  char* readable = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  message = std::string(readable != nullptr ? readable : name) + ": " + fault;
  std::free(readable);
  return 1;
}

}  // namespace host

void __syncthreads() { host::wait(&host::Fiber::block_barriers, 0, host::here.threads.x, false); }

void __syncwarp(unsigned mask) {
  const unsigned first = host::running / 32 * 32;
  if (mask != 0xffffffffu) host::set_fault(host::where() + " waits with a mask that is not of 32 lanes");
  host::wait(&host::Fiber::warp_barriers, first, first + 32, true);
}

const char* cudaGetErrorString(cudaError_t) { return host::message.c_str(); }

extern "C" {

int64_t xds_launches() { return host::launches; }
int64_t xds_questions() { return host::questions; }
void xds_set_multiprocessors(int count) { host::multiprocessors = count; }
void xds_check_accesses(bool checks) { host::is_checking = checks; }

// Of each grid only these; no block: all.
void xds_run_blocks(const int64_t* blocks, int64_t count) { host::blocks_to_run.assign(blocks, blocks + count); }

#define XDS_ACCESS(name, size, writes)                                                                       \
  void name(void* address) {                                                                                 \
    if (host::is_in_kernel && host::is_checking) host::check(reinterpret_cast<uintptr_t>(address), size, writes); \
  }
#define XDS_ACCESSES(size)                                  \
  XDS_ACCESS(__tsan_read##size, size, false)                \
  XDS_ACCESS(__tsan_write##size, size, true)                \
  XDS_ACCESS(__tsan_unaligned_read##size, size, false)      \
  XDS_ACCESS(__tsan_unaligned_write##size, size, true)

XDS_ACCESSES(1)
XDS_ACCESSES(2)
XDS_ACCESSES(4)
XDS_ACCESSES(8)
XDS_ACCESSES(16)

void __tsan_read_range(void* address, size_t size) {
  if (host::is_in_kernel && host::is_checking) host::check(reinterpret_cast<uintptr_t>(address), size, false);
}
void __tsan_write_range(void* address, size_t size) {
  if (host::is_in_kernel && host::is_checking) host::check(reinterpret_cast<uintptr_t>(address), size, true);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
int64_t __tsan_atomic64_load(const volatile int64_t* from, int) { return __atomic_load_n(from, __ATOMIC_SEQ_CST); }
int32_t __tsan_atomic32_fetch_add(volatile int32_t* to, int32_t value, int) {
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
void __tsan_atomic64_store(volatile int64_t* to, int64_t value, int) { __atomic_store_n(to, value, __ATOMIC_SEQ_CST); }
}
