// The event loop of one launch: clusters start, warps run in slices, asynchronous work completes.
#include "machine/simulation.h"

#include <algorithm>
#include <cstdlib>

namespace halfbyte::gpu {

namespace {
constexpr double kWakeDelay = 8;            // cycles
constexpr uint32_t kEventsPerPoll = 64;
constexpr auto kPollInterval = std::chrono::milliseconds(50);
// Without progress and without a repeated state a launch ends after this many times the
// instructions after which it is looked at.
constexpr uint64_t kNoProgressFactor = 40;
constexpr double kClusterStart = 200;       // cycles between a cluster's end and its successor's start
}  // namespace

TensorMemory& Cta::tmem() {
  if (!tensor_memory) {
    tensor_memory = std::make_unique<TensorMemory>();
    tensor_memory->cells.assign(TensorMemory::kLanes * TensorMemory::kColumns, 0x7FC0DEADu);
    tensor_memory->owner.assign(TensorMemory::kColumns, -1);
  }
  return *tensor_memory;
}

Mbarrier* Cta::find_mbarrier(uint32_t offset) {
  auto found = mbarriers.find(offset);
  return found == mbarriers.end() ? nullptr : &found->second;
}

Cta::~Cta() {
  if (shared != nullptr) simulation->shared_buffers.give_back(shared);
}

Warp::~Warp() {
  if (registers != nullptr) simulation->register_buffers.give_back(registers);
}

Simulation::Simulation(const Program& program_, GlobalMemory& memory_, const LaunchConfig& config_)
    : program(program_), memory(memory_), config(config_) {
  num_clusters_ = 1;
  for (int axis = 0; axis < 3; ++axis) num_clusters_ *= config.grid[axis] / config.cluster[axis];
  shared_buffers.set_size(shared_bytes());
  register_buffers.set_size(warp_state_bytes());
  jitter_state_ = config.latency_seed * 0x9E3779B97F4A7C15ull + 1;
}

Simulation::~Simulation() = default;

uint32_t Simulation::shared_bytes() const {
  return std::max(program.static_shared_end, config.reserved_shared_bytes) + config.dynamic_shared_bytes;
}

size_t Simulation::predicate_words() const {
  return (program.num_predicates + kLanes - 1) / kLanes * kLanes;
}

size_t Simulation::warp_state_bytes() const {
  const size_t words = static_cast<size_t>(program.register_slots) * kLanes + predicate_words();
  return words * sizeof(uint32_t) + static_cast<size_t>(program.local_bytes) * kLanes;
}

void Simulation::push_event(const Event& event) {
  heap_.push_back(event);
  std::push_heap(heap_.begin(), heap_.end(), Later());
}

Simulation::Event Simulation::pop_event() {
  std::pop_heap(heap_.begin(), heap_.end(), Later());
  Event event = heap_.back();
  heap_.pop_back();
  return event;
}

void Simulation::schedule(double when, std::function<void()> action) {
  uint32_t position;
  if (free_actions_.empty()) {
    position = static_cast<uint32_t>(actions_.size());
    actions_.push_back(std::move(action));
  } else {
    position = free_actions_.back();
    free_actions_.pop_back();
    actions_[position] = std::move(action);
  }
  push_event({when, next_order_++, nullptr, position});
  slice_limit_ = std::min(slice_limit_, when);  // what completes is seen by the warp that issued it
}

void Simulation::run_action(uint32_t position) {
  std::function<void()> action = std::move(actions_[position]);
  actions_[position] = nullptr;
  free_actions_.push_back(position);
  action();
}

double Simulation::latency(double cycles) {
  if (config.latency_seed == 0) return cycles;
  // xorshift64*: the same seed gives the same schedule everywhere.
  jitter_state_ ^= jitter_state_ >> 12;
  jitter_state_ ^= jitter_state_ << 25;
  jitter_state_ ^= jitter_state_ >> 27;
  const uint64_t bits = jitter_state_ * 0x2545F4914F6CDD1Dull;
  return cycles * (0.2 + 2.0 * static_cast<double>(bits >> 11) / 9007199254740992.0);
}

void Simulation::enqueue(Warp& warp) {
  if (warp.is_queued) return;
  warp.is_queued = true;
  push_event({warp.time, next_order_++, &warp, 0});
}

void Simulation::wake(WaitQueue& queue) {
  std::vector<Warp*> waiting;
  waiting.swap(queue.warps);
  // A running warp may be ahead of the event that it was started by.
  const double since = running_ ? std::max(now, running_->time) : now;
  for (Warp* warp : waiting) {
    for (int i = 0; i < warp->num_fragments; ++i) {
      Fragment& fragment = warp->fragments[i];
      if (fragment.state != FragmentState::kWaiting || fragment.wait.queue != &queue) continue;
      fragment.state = FragmentState::kReady;
      fragment.wait.queue = nullptr;
      if (fragment.advance_on_wake) ++fragment.pc;
      fragment.advance_on_wake = false;
    }
    warp->stop = -1;
    if (warp == running_) continue;
    warp->time = std::max(warp->time, since + kWakeDelay);
    enqueue(*warp);
  }
}

bool Simulation::take_pending_cluster(uint32_t id[3]) {
  if (next_cluster_ >= num_clusters_) return false;
  uint64_t position = next_cluster_++;
  for (int axis = 0; axis < 3; ++axis) {
    const uint64_t extent = config.grid[axis] / config.cluster[axis];
    id[axis] = static_cast<uint32_t>(position % extent);
    position /= extent;
  }
  return true;
}

void Simulation::start_clusters() {
  uint32_t id[3];
  while (clusters.size() < config.max_resident_clusters && take_pending_cluster(id)) start_cluster(id);
}

void Simulation::start_cluster(const uint32_t id[3]) {
  auto cluster = std::make_unique<Cluster>();
  std::copy(id, id + 3, cluster->id);
  const uint32_t* size = config.cluster;
  const uint32_t num_ctas = size[0] * size[1] * size[2];
  for (uint32_t rank = 0; rank < num_ctas; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->simulation = this;
    cta->cluster = cluster.get();
    cta->rank = rank;
    cta->id[0] = id[0] * size[0] + rank % size[0];
    cta->id[1] = id[1] * size[1] + rank / size[0] % size[1];
    cta->id[2] = id[2] * size[2] + rank / (size[0] * size[1]);
    cta->shared_bytes = shared_bytes();
    cta->shared = static_cast<uint8_t*>(shared_buffers.take());
    std::memset(cta->shared, static_cast<int>(config.shared_poison), cta->shared_bytes);
    start_warps(*cta);
    cluster->ctas.push_back(std::move(cta));
  }
  cluster->live_ctas = num_ctas;
  clusters.push_back(std::move(cluster));
}

void Simulation::start_warps(Cta& cta) {
  const uint32_t threads = config.block[0] * config.block[1] * config.block[2];
  const uint32_t num_warps = (threads + kLanes - 1) / kLanes;
  for (uint32_t index = 0; index < num_warps; ++index) {
    auto warp = std::make_unique<Warp>();
    warp->simulation = this;
    warp->cta = &cta;
    warp->program = &program;
    warp->index = index;
    const uint32_t lanes = std::min<uint32_t>(kLanes, threads - index * kLanes);
    warp->started = warp->live = lanes == kLanes ? kFullMask : (1u << lanes) - 1;
    // One buffer: registers, then predicates, then local memory.
    warp->registers = static_cast<uint32_t*>(register_buffers.take());
    std::memset(warp->registers, 0, warp_state_bytes());
    warp->predicates = warp->registers + static_cast<size_t>(program.register_slots) * kLanes;
    warp->local = reinterpret_cast<uint8_t*>(warp->predicates + predicate_words());
    warp->predicates[kAlwaysTrue] = kFullMask;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t thread = index * kLanes + lane;
      warp->tid[0][lane] = thread % config.block[0];
      warp->tid[1][lane] = thread / config.block[0] % config.block[1];
      warp->tid[2][lane] = thread / (config.block[0] * config.block[1]);
    }
    warp->fragments[0].mask = warp->live;
    warp->num_fragments = 1;
    warp->time = now + (next_cluster_ > config.max_resident_clusters ? kClusterStart : 0);
    cta.warps.push_back(std::move(warp));
  }
  cta.live_warps = num_warps;
  live_warps += num_warps;
  for (uint32_t i = 0; i < num_warps; ++i) {
    enqueue(*cta.warps[config.reverse_warps ? num_warps - 1 - i : i]);
  }
}

void Simulation::retire_warp(Warp& warp) {
  note_progress();
  --live_warps;
  Cta& cta = *warp.cta;
  release_exited_warp(warp);
  if (--cta.live_warps > 0) return;
  check_cta_exit(cta);
  if (--cta.cluster->live_ctas == 0) {
    end_time_ = std::max(end_time_, warp.time);
    now = std::max(now, warp.time);
    retire_cluster(*cta.cluster);
  }
}

void Simulation::retire_cluster(Cluster& cluster) {
  auto is_busy = [](const std::unique_ptr<Cluster>& candidate) {
    return std::any_of(candidate->ctas.begin(), candidate->ctas.end(), [](const auto& cta) {
      return cta->async_operations > 0 || cta->tensor_pipe.pending > 0;
    });
  };
  // Completions hold pointers into a cluster: it lives until the last of them, and the warp that
  // retires it is still on the stack, so that it is freed when the next cluster retires.
  lingering_.erase(std::remove_if(lingering_.begin(), lingering_.end(),
                                  [&](const auto& candidate) { return !is_busy(candidate); }),
                   lingering_.end());
  auto found = std::find_if(clusters.begin(), clusters.end(),
                            [&](const auto& candidate) { return candidate.get() == &cluster; });
  lingering_.push_back(std::move(*found));
  clusters.erase(found);
  start_clusters();
}

void Simulation::poll_caller() {
  events_to_poll_ = kEventsPerPoll;
  const auto time = std::chrono::steady_clock::now();
  if (config.poll == nullptr || time < next_poll_) return;
  next_poll_ = time + kPollInterval;
  if (config.poll() != 0) throw Stopped();
}

const char* Simulation::find_endless_run(const Warp& warp) {
  if (instructions - last_progress > kNoProgressFactor * config.livelock_instructions) return "no-progress";
  livelock_.look_at(warp, progress, warp_state_bytes());
  // Only warps are queued, each of them once, and all of them have come back to an earlier state.
  const bool is_work_pending = actions_.size() > free_actions_.size();
  return !heap_.empty() && !is_work_pending && livelock_.repeated() >= heap_.size() ? "livelock" : nullptr;
}

void Simulation::run() {
  next_poll_ = std::chrono::steady_clock::now() + kPollInterval;
  events_to_poll_ = kEventsPerPoll;
  start_clusters();
  while (live_warps > 0 || !heap_.empty()) {
    if (heap_.empty()) {
      if (expire_waits()) continue;
      return report_hang("deadlock");
    }
    if (events_to_poll_-- == 0) poll_caller();
    Event event = pop_event();
    now = event.when;
    if (event.warp == nullptr) {
      run_action(event.action);
      note_progress();
    } else {
      running_ = event.warp;
      running_->is_queued = false;
      run_slice(*running_);
      running_ = nullptr;
      end_time_ = std::max(end_time_, now);
    }
    if (instructions - last_progress > config.livelock_instructions) {
      const char* kind = find_endless_run(*event.warp);
      if (kind != nullptr) return report_hang(kind);
    }
    if (config.max_instructions > 0 && instructions > config.max_instructions) {
      return report_hang("instruction-limit");
    }
  }
}

}  // namespace halfbyte::gpu
