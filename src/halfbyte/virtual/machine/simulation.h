// One launch: clusters, warps, virtual time, asynchronous events.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "machine/buffer_pool.h"
#include "machine/cta.h"
#include "machine/livelock.h"
#include "machine/program.h"
#include "machine/report.h"
#include "machine/warp.h"

namespace halfbyte::gpu {

// Findings about work that a CTA leaves unfinished when its last warp exits (hang.cpp).
void check_cta_exit(Cta& cta);
// A warp has exited: barriers that wait for its threads may complete (barriers.cpp).
void release_exited_warp(Warp& warp);

// Filled by Python (ctypes): keep the order.
struct LaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t dynamic_shared_bytes;
  uint32_t max_resident_clusters;
  uint32_t num_sms;
  const uint8_t* parameters;
  uint32_t parameter_bytes;
  uint32_t adversarial_try_wait;  // 1: the first failing try_wait of a wait returns false at once
  uint64_t livelock_instructions;  // instructions without progress that count as a livelock
  uint64_t max_instructions;       // 0: no limit
  uint32_t num_threads;            // for tensor core arithmetic
  uint32_t shared_poison;          // byte that fresh shared memory holds
  uint32_t latency_seed;           // 0: fixed latencies; else asynchronous latencies vary 0.2x to 2.2x
  uint32_t reverse_warps;          // 1: later warps go first where times are equal
  uint32_t reserved_shared_bytes;  // of each CTA's shared memory, the system's first bytes
  uint32_t max_warps_per_sm;
  uint32_t tensor_memory_columns;  // 0 on GPUs without tensor memory
  uint32_t compute_capability;     // 90, 100, 103, 120
  double clock_hz;                 // what %globaltimer and nanosleep take a cycle for
  void (*print)(const char* text, uint64_t bytes);
  int32_t (*poll)();               // called some twenty times a second; not 0 ends the launch
};

// The caller's `poll` ended the launch.
struct Stopped {};

struct Simulation {
  Simulation(const Program& program, GlobalMemory& memory, const LaunchConfig& config);
  ~Simulation();

  void run();  // throws Fault, Stopped

  // Runs `action` at virtual time `when` (cycles).
  void schedule(double when, std::function<void()> action);
  // Latency in cycles after the seed's jitter.
  double latency(double cycles);
  // Wakes every fragment that waits on the queue, no earlier than `now`.
  void wake(WaitQueue& queue);
  void enqueue(Warp& warp);
  // Something observable changed: barriers, memory, completions, exits.
  void note_progress() { last_progress = instructions; ++progress; }

  // Cluster launch control: takes a cluster that has not started; false when none is left.
  bool take_pending_cluster(uint32_t id[3]);

  BufferPool shared_buffers;    // of CTAs; declared first: clusters give their buffers back
  BufferPool register_buffers;  // of warps: registers, predicates, local memory
  const Program& program;
  GlobalMemory& memory;
  LaunchConfig config;
  Findings findings;
  double now = 0;          // cycles, time of the event being run
  uint64_t instructions = 0;
  uint64_t progress = 0;
  uint64_t last_progress = 0;  // value of `instructions` then
  uint64_t next_token = 1;     // for in-flight ranges
  uint64_t live_warps = 0;
  std::string deadlock;        // JSON of the report when the launch hangs
  std::vector<std::unique_ptr<Cluster>> clusters;  // resident
  double end_time() const { return end_time_; }    // cycles

 private:
  friend struct Warp;
  struct Event {
    double when;
    uint64_t order;
    Warp* warp;       // or nullptr
    uint32_t action;  // position in actions_ when there is no warp
  };
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return a.when != b.when ? a.when > b.when : a.order > b.order;
    }
  };
  void run_action(uint32_t position);
  void push_event(const Event& event);
  Event pop_event();
  uint32_t shared_bytes() const;     // of a CTA
  size_t predicate_words() const;    // of a warp, rounded up to a slot
  size_t warp_state_bytes() const;
  void start_clusters();
  void start_cluster(const uint32_t id[3]);
  void start_warps(Cta& cta);
  void retire_cluster(Cluster& cluster);
  void retire_warp(Warp& warp);
  void run_slice(Warp& warp);
  bool expire_waits();  // true when a suspended try_wait was told to return false
  void report_hang(const char* kind);
  void poll_caller();
  // After a slice of a warp: the kind of hang that the launch is in, or nullptr.
  const char* find_endless_run(const Warp& warp);

  std::vector<Event> heap_;
  std::vector<std::function<void()>> actions_;
  std::vector<uint32_t> free_actions_;
  uint64_t next_order_ = 0;
  Warp* running_ = nullptr;
  double end_time_ = 0;
  double slice_limit_ = 0;  // cycles; when the running warp lets others run
  uint64_t progress_at_expiry_ = UINT64_MAX;  // when try_waits were last told that their time is over
  int idle_rounds_ = 0;                       // expiries since then without progress
  uint64_t next_cluster_ = 0;
  uint64_t num_clusters_ = 0;
  uint64_t jitter_state_ = 0;
  uint32_t events_to_poll_ = 0;
  std::chrono::steady_clock::time_point next_poll_;
  LivelockWatch livelock_;
  std::vector<std::unique_ptr<Cluster>> lingering_;  // exited, with asynchronous work in flight
};

}  // namespace halfbyte::gpu
