// A fan-out over short-lived threads. No pool and no OpenMP: nothing spins between calls, and a
// fork between two calls inherits no state.
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "abi.h"

namespace halfbyte {

void run_tasks(int64_t tasks, int threads, void (*task)(void*, int64_t, int), void* context) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int worker) {
    for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) task(context, i, worker);
  };
  if (threads > tasks) threads = (int)tasks;
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
  } catch (const std::exception&) {
    // No thread to be had: the caller and those already started do all tasks.
  }
  work(0);
  for (auto& thread : others) thread.join();
}

}  // namespace halfbyte
