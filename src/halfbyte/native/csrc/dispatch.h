// What the exported functions share: status codes and the runs they start.
#pragma once
#include "abi.h"

namespace halfbyte {

enum Status : int32_t { kOk = 0, kBadRecord = 1, kNoMemory = 2 };

Status run_product(const Kernels* kernels, const ProductJob& job);
Status run_linear(const Kernels* kernels, const LinearJob& job);
void run_gptq(const GptqJob& job);

}  // namespace halfbyte
