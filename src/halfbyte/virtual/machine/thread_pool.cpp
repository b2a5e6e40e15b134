#include "machine/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace halfbyte::gpu {
namespace {

// Rounds of a worker's loop before it sleeps: some tens of microseconds, about the pause between two
// matrix products of a kernel's main loop.
constexpr int kSpins = 4000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Job {
  void (*task)(void*, uint32_t) = nullptr;
  void* context = nullptr;
  uint32_t count = 0;
  std::atomic<uint32_t> next{0};
  std::atomic<uint32_t> done{0};

  void work() {
    for (uint32_t index; (index = next.fetch_add(1)) < count;) {
      task(context, index);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

class Pool {
 public:
  explicit Pool(uint32_t workers) : process_(getpid()), workers_(workers) {
    for (uint32_t i = 0; i < workers; ++i) std::thread([this] { serve(); }).detach();
  }
  // Threads do not survive a fork: the child needs a pool of its own.
  bool is_usable(uint32_t workers) const { return process_ == getpid() && workers_ >= workers; }

  void run(const std::shared_ptr<Job>& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load()) wake_.notify_all();
    job->work();
    while (job->done.load(std::memory_order_acquire) < job->count) pause_briefly();
  }

 private:
  void serve() {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) {
        pause_briefly();
      }
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        sleepers_.fetch_sub(1);
        seen = generation_.load();
        job = job_;
      }
      job->work();
    }
  }

  const pid_t process_;
  const uint32_t workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Job> job_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace

void run_tasks(uint32_t num_threads, uint32_t count, void (*task)(void*, uint32_t), void* context) {
  if (num_threads < 2 || count < 2) {
    for (uint32_t index = 0; index < count; ++index) task(context, index);
    return;
  }
  // Detached workers may outlive every object of the program, so a pool is never destroyed.
  static std::mutex mutex;
  static Pool* pool = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (!pool || !pool->is_usable(num_threads - 1)) pool = new Pool(num_threads - 1);
  auto job = std::make_shared<Job>();
  job->task = task;
  job->context = context;
  job->count = count;
  pool->run(job);
}

}  // namespace halfbyte::gpu
