// The order of work of a packed linear layer: chunks of rows, panels of outputs, threads, memory.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "abi.h"
#include "dispatch.h"

namespace halfbyte {
namespace {

constexpr int64_t kActivationBytes = 3 << 20;  // of decoded activations: stays in the L2 cache
constexpr int64_t kMaxChunkRows = 512;         // 32 KiB of sums a thread

// One 64-byte aligned allocation, handed out in aligned pieces.
class Arena {
 public:
  explicit Arena(int64_t bytes) : memory_((char*)std::aligned_alloc(64, round_up(bytes))) {}
  ~Arena() { std::free(memory_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  bool is_ready() const { return memory_ != nullptr; }
  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(memory_ + used_);
    used_ += round_up(count * (int64_t)sizeof(T));
    return piece;
  }
  static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Sizes of one call; fixed before any work.
struct Plan {
  int64_t blocks;       // of one row
  int64_t chunk_rows;   // rows decoded together, a multiple of kTileRows
  int64_t panels;       // of the whole output
  int threads;

  explicit Plan(const LinearJob& job) {
    blocks = job.depth / job.block_size;
    const int64_t row_bytes = job.depth + 8 * blocks;
    const int64_t most = std::min(kMaxChunkRows, kActivationBytes / row_bytes);
    chunk_rows = (std::min(job.rows, std::max<int64_t>(most, 1)) + kTileRows - 1) / kTileRows *
                 kTileRows;
    panels = (job.outputs + kPanelColumns - 1) / kPanelColumns;
    threads = std::max(1, job.threads);
  }
  int64_t total_bytes(const LinearJob& job) const {
    const int64_t panel = kPanelColumns * (job.depth + 4 * (blocks + job.rank + 2 + chunk_rows));
    return chunk_rows * (job.depth + 8 * blocks) + 64 * 3 + threads * (panel + 64 * 6);
  }
};

struct LinearTask {
  const Kernels* kernels;
  const LinearJob* job;
  const Plan* plan;
  Activations act;
  Panel* panels;  // [threads]
  float** sums;   // [threads]
};

void decode_task(void* context, int64_t tile, int) {
  const auto* task = static_cast<LinearTask*>(context);
  task->kernels->decode_tile(task->job, &task->act, tile);
}

void multiply_task(void* context, int64_t panel, int worker) {
  const auto* task = static_cast<LinearTask*>(context);
  const Panel* decoded = &task->panels[worker];
  task->kernels->decode_panel(task->job, panel, decoded);
  task->kernels->multiply_panel(task->job, &task->act, panel, decoded, task->sums[worker]);
}

struct ProductTask {
  const Kernels* kernels;
  const ProductJob* job;
  float* scratch;  // [threads][stride]
  int64_t stride;
};

constexpr int64_t kProductRows = 16;  // of the weight, per task

void product_task(void* context, int64_t index, int worker) {
  const auto* task = static_cast<ProductTask*>(context);
  const int64_t first = index * kProductRows;
  const int64_t last = std::min(first + kProductRows, task->job->weight.rows);
  task->kernels->multiply_rows(task->job, first, last, task->scratch + worker * task->stride);
}

}  // namespace

Status run_product(const Kernels* kernels, const ProductJob& job) {
  const int threads = std::max(1, job.weight.threads);
  const int64_t stride = (job.weight.columns + 15) / 16 * 16;
  Arena arena(threads * stride * (int64_t)sizeof(float) + 64);
  if (!arena.is_ready()) return kNoMemory;
  ProductTask task{kernels, &job, arena.take<float>(threads * stride), stride};
  run_tasks((job.weight.rows + kProductRows - 1) / kProductRows, threads, product_task, &task);
  return kOk;
}

Status run_linear(const Kernels* kernels, const LinearJob& job) {
  const Plan plan(job);
  Arena arena(plan.total_bytes(job));
  const std::unique_ptr<Panel[]> panels(new (std::nothrow) Panel[plan.threads]);
  const std::unique_ptr<float*[]> sums(new (std::nothrow) float*[plan.threads]);
  if (!arena.is_ready() || panels == nullptr || sums == nullptr) return kNoMemory;
  LinearTask task{kernels, &job, &plan, {}, panels.get(), sums.get()};
  task.act.codes = arena.take<int8_t>(plan.chunk_rows * job.depth);
  task.act.starts = arena.take<int32_t>(plan.chunk_rows * plan.blocks);
  task.act.scales = arena.take<float>(plan.chunk_rows * plan.blocks);
  for (int i = 0; i < plan.threads; ++i) {
    panels[i].codes = arena.take<uint8_t>(kPanelColumns * job.depth);
    panels[i].scales = arena.take<float>(kPanelColumns * plan.blocks);
    panels[i].lora_up = arena.take<float>(kPanelColumns * job.rank);
    panels[i].bias = arena.take<float>(kPanelColumns);
    panels[i].factor = arena.take<float>(kPanelColumns);
    sums[i] = arena.take<float>(kPanelColumns * plan.chunk_rows);
  }
  for (int64_t row = 0; row < job.rows; row += plan.chunk_rows) {
    task.act.first_row = row;
    task.act.rows = std::min(plan.chunk_rows, job.rows - row);
    const int64_t tiles = (task.act.rows + kTileRows - 1) / kTileRows;
    run_tasks(tiles, tiles < 4 ? 1 : plan.threads, decode_task, &task);
    run_tasks(plan.panels, plan.threads, multiply_task, &task);
  }
  return kOk;
}

}  // namespace halfbyte
