#include "machine/memory.h"

#include "machine/report.h"

namespace halfbyte::gpu {

void GlobalMemory::register_buffer(uint64_t begin, uint64_t bytes, const std::string& name,
                                   bool read_only, bool stale) {
  const uint64_t end = begin + bytes;
  // Whatever older, freed buffer the allocator handed out again is cut to what lies outside.
  auto it = buffers_.upper_bound(begin);
  if (it != buffers_.begin()) --it;
  while (it != buffers_.end() && it->second.begin < end) {
    Allocation old = it->second;
    if (old.end <= begin) {
      ++it;
      continue;
    }
    it = buffers_.erase(it);
    if (old.begin < begin) {
      Allocation left = old;
      left.end = begin;
      buffers_[left.begin] = left;
    }
    if (old.end > end) {
      Allocation right = old;
      right.begin = end;
      it = buffers_.emplace(end, right).first;
      ++it;
    }
  }
  buffers_[begin] = {begin, end, name, false, read_only, stale};
  ++generation_;
}

void GlobalMemory::mark_freed(uint64_t begin) {
  auto it = buffers_.find(begin);
  if (it != buffers_.end()) it->second.is_freed = true;
  ++generation_;
}

const Allocation* GlobalMemory::find(uint64_t address) const {
  auto it = buffers_.upper_bound(address);
  if (it == buffers_.begin()) return nullptr;
  --it;
  return address < it->second.end ? &it->second : nullptr;
}

std::string GlobalMemory::describe_nearest(uint64_t address) const {
  if (buffers_.empty()) return "no buffer is registered";
  auto above = buffers_.upper_bound(address);
  const Allocation* nearest = nullptr;
  uint64_t distance = UINT64_MAX;
  const char* relation = "";
  if (above != buffers_.end()) {
    nearest = &above->second;
    distance = above->second.begin - address;
    relation = "before the start";
  }
  if (above != buffers_.begin()) {
    const Allocation& below = std::prev(above)->second;
    if (address < below.end) {
      return format_text("byte %llu of %s%s", static_cast<unsigned long long>(address - below.begin),
                         below.name.c_str(), below.is_freed ? " (freed)" : "");
    }
    if (address - below.end < distance) {
      nearest = &below;
      distance = address - below.end;
      relation = "past the end";
    }
  }
  return format_text("%llu bytes %s of %s%s (%llu bytes at 0x%llx)",
                     static_cast<unsigned long long>(distance), relation, nearest->name.c_str(),
                     nearest->is_freed ? ", freed" : "",
                     static_cast<unsigned long long>(nearest->end - nearest->begin),
                     static_cast<unsigned long long>(nearest->begin));
}

}  // namespace halfbyte::gpu
