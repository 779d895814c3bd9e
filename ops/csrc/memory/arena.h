// The blocks of a segment's data: first fit, so that memory that was used before is used again first.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace xds {

class Arena {
 public:
  static constexpr uint64_t PAGE = 4096;

  explicit Arena(uint64_t size_bytes) { free_[0] = size_bytes; }

  static uint64_t rounded(uint64_t size_bytes) { return (size_bytes + PAGE - 1) / PAGE * PAGE; }

  // The offset of a new block, or -1.
  int64_t take(uint64_t size_bytes) {
    const uint64_t need = rounded(size_bytes ? size_bytes : 1);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < need) continue;
      const uint64_t offset = it->first, rest = it->second - need;
      free_.erase(it);
      if (rest) free_[offset + need] = rest;
      taken_[offset] = need;
      return static_cast<int64_t>(offset);
    }
    return -1;
  }

  // Returns the size of the block.
  uint64_t give(uint64_t offset) {
    const auto found = taken_.find(offset);
    if (found == taken_.end()) return 0;
    const uint64_t size = found->second;
    taken_.erase(found);
    auto here = free_.emplace(offset, size).first;
    const auto after = std::next(here);
    if (after != free_.end() && here->first + here->second == after->first) {
      here->second += after->second;
      free_.erase(after);
    }
    if (here != free_.begin()) {
      const auto before = std::prev(here);
      if (before->first + before->second == here->first) {
        before->second += here->second;
        free_.erase(here);
      }
    }
    return size;
  }

 private:
  std::map<uint64_t, uint64_t> free_, taken_;  // offset -> bytes
};

}  // namespace xds
