// Host buffers of one size that are handed out again: a launch of many small CTAs would otherwise
// spend most of its time in the allocator and in page faults.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace halfbyte::gpu {

class BufferPool {
 public:
  BufferPool() = default;
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool() {
    for (void* buffer : all_) std::free(buffer);
  }

  void set_size(size_t bytes) { bytes_ = (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // An uninitialised buffer at a multiple of kAlignment.
  void* take() {
    if (free_.empty()) {
      void* buffer = std::aligned_alloc(kAlignment, bytes_);
      if (buffer == nullptr) throw std::bad_alloc();
      all_.push_back(buffer);
      return buffer;
    }
    void* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }

  void give_back(void* buffer) { free_.push_back(buffer); }

 private:
  static constexpr size_t kAlignment = 1024;
  size_t bytes_ = kAlignment;
  std::vector<void*> all_, free_;
};

}  // namespace halfbyte::gpu
