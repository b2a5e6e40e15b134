// A few threads that share out tensor core arithmetic.
#pragma once

#include <cstdint>

namespace halfbyte::gpu {

// Calls task(context, i) for every i < count, on up to `num_threads` threads, the caller's included,
// and returns when all are done. Which thread runs which task is left open: tasks must not care.
void run_tasks(uint32_t num_threads, uint32_t count, void (*task)(void* context, uint32_t index),
               void* context);

// The same for a callable.
template <class Body>
void run_parallel(uint32_t num_threads, uint32_t count, Body&& body) {
  run_tasks(
      num_threads, count,
      [](void* context, uint32_t index) { (*static_cast<Body*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace halfbyte::gpu
