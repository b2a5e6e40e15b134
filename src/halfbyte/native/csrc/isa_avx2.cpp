// The kernels for x86-64-v3 CPUs; null where the unit is built without AVX2, FMA and F16C.
#include "abi.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes_avx2.h"
#include "packed_linear.h"
#include "quantize_blocks.h"

namespace halfbyte {
const Kernels* avx2_kernels() {
  static const Kernels kernels = {"avx2",        quantize_rows, amax_rows,
                                  dequantize_rows, project_rows,  multiply_rows,
                                  decode_tile,     decode_panel,  multiply_panel};
  return &kernels;
}
}  // namespace halfbyte

#else

namespace halfbyte {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace halfbyte

#endif
