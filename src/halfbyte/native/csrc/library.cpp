// The exported functions: the choice of an instruction set, and one call per kind of job.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "abi.h"
#include "dispatch.h"

#define HALFBYTE_EXPORT extern "C" __attribute__((visibility("default")))

namespace halfbyte {
namespace {

// A row range per task: a few tasks a thread even out rows that take longer.
int64_t rows_per_task(int64_t rows, int threads) {
  return std::max<int64_t>(1, rows / (4 * (int64_t)std::max(threads, 1)));
}

struct QuantizeTask {
  const Kernels* kernels;
  const QuantizeJob* job;
  int64_t step;
  std::mutex mutex;
};

void quantize_task(void* context, int64_t index, int) {
  auto* task = static_cast<QuantizeTask*>(context);
  const int64_t first = index * task->step;
  int64_t counts[kNumCounters] = {};
  task->kernels->quantize_rows(task->job, first, std::min(first + task->step, task->job->rows),
                               counts);
  const std::lock_guard<std::mutex> lock(task->mutex);
  for (int i = 0; i < kNumCounters; ++i) task->job->counts[i] += counts[i];
}

struct AmaxTask {
  const Kernels* kernels;
  AmaxJob* job;
  int64_t step;
  std::mutex mutex;
};

void amax_task(void* context, int64_t index, int) {
  auto* task = static_cast<AmaxTask*>(context);
  const int64_t first = index * task->step;
  float amax = 0.0f;
  int32_t nonfinite = 0;
  task->kernels->amax_rows(task->job, first, std::min(first + task->step, task->job->rows), &amax,
                           &nonfinite);
  const std::lock_guard<std::mutex> lock(task->mutex);
  task->job->amax = std::max(task->job->amax, amax);
  task->job->nonfinite |= nonfinite;
}

struct DequantizeTask {
  const Kernels* kernels;
  const DequantizeJob* job;
  int64_t step;
};

void dequantize_task(void* context, int64_t index, int) {
  const auto* task = static_cast<DequantizeTask*>(context);
  const int64_t first = index * task->step;
  task->kernels->dequantize_rows(task->job, first, std::min(first + task->step, task->job->rows));
}

struct ProjectTask {
  const Kernels* kernels;
  const ProjectJob* job;
  int64_t step;
};

void project_task(void* context, int64_t index, int) {
  const auto* task = static_cast<ProjectTask*>(context);
  const int64_t first = index * task->step;
  task->kernels->project_rows(task->job, first, std::min(first + task->step, task->job->rows));
}

const Kernels* kernels_of(int level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
  if (level == 1 && has_v3) return avx2_kernels();
  if (level == 2 && has_v3 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
    return avx512_kernels();
  }
#endif
  return level == 0 ? generic_kernels() : nullptr;
}

}  // namespace
}  // namespace halfbyte

using namespace halfbyte;

HALFBYTE_EXPORT int32_t halfbyte_abi_version() { return HALFBYTE_ABI_VERSION; }

// Sizes of the records, so that the caller's and the library's cannot drift apart unseen.
HALFBYTE_EXPORT int64_t halfbyte_record_bytes(int32_t record) {
  constexpr int64_t kSizes[] = {sizeof(QuantizeJob), sizeof(AmaxJob), sizeof(LinearJob),
                                sizeof(DequantizeJob), sizeof(GptqJob), sizeof(ProductJob),
                                sizeof(ProjectJob)};
  return record >= 0 && record < 7 ? kSizes[record] : 0;
}

// 1 where instruction-set `level` (0 generic, 1 avx2, 2 avx512) is built and this CPU has it.
HALFBYTE_EXPORT int32_t halfbyte_has_level(int32_t level) { return kernels_of(level) != nullptr; }

HALFBYTE_EXPORT int32_t halfbyte_quantize(int32_t level, QuantizeJob* job) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || job->struct_bytes != sizeof(QuantizeJob)) return kBadRecord;
  std::memset(job->counts, 0, kNumCounters * sizeof(int64_t));
  QuantizeTask task{kernels, job, rows_per_task(job->rows, job->threads), {}};
  run_tasks((job->rows + task.step - 1) / task.step, job->threads, quantize_task, &task);
  return kOk;
}

HALFBYTE_EXPORT int32_t halfbyte_amax(int32_t level, AmaxJob* job) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || job->struct_bytes != sizeof(AmaxJob)) return kBadRecord;
  job->amax = 0.0f;
  job->nonfinite = 0;
  AmaxTask task{kernels, job, rows_per_task(job->rows, job->threads), {}};
  run_tasks((job->rows + task.step - 1) / task.step, job->threads, amax_task, &task);
  return kOk;
}

HALFBYTE_EXPORT int32_t halfbyte_dequantize(int32_t level, DequantizeJob* job) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || job->struct_bytes != sizeof(DequantizeJob)) return kBadRecord;
  DequantizeTask task{kernels, job, rows_per_task(job->rows, job->threads)};
  run_tasks((job->rows + task.step - 1) / task.step, job->threads, dequantize_task, &task);
  return kOk;
}

HALFBYTE_EXPORT int32_t halfbyte_linear(int32_t level, LinearJob* job) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || job->struct_bytes != sizeof(LinearJob)) return kBadRecord;
  return run_linear(kernels, *job);
}

HALFBYTE_EXPORT int32_t halfbyte_gptq(int32_t, GptqJob* job) {
  if (job->struct_bytes != sizeof(GptqJob) || job->columns > kMaxGptqColumns) return kBadRecord;
  run_gptq(*job);
  return kOk;
}

HALFBYTE_EXPORT int32_t halfbyte_product(int32_t level, ProductJob* job) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || job->weight.struct_bytes != sizeof(ProductJob)) return kBadRecord;
  return run_product(kernels, *job);
}

HALFBYTE_EXPORT int32_t halfbyte_project(int32_t level, ProjectJob* job) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || job->struct_bytes != sizeof(ProjectJob)) return kBadRecord;
  ProjectTask task{kernels, job, 16};
  run_tasks((job->rows + task.step - 1) / task.step, job->threads, project_task, &task);
  return kOk;
}
