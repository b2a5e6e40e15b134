// The kernels for CPUs with AVX-512 F, BW, VL, DQ and VNNI; null where built without them.
#include "abi.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own intrinsics read an "undefined" register on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "lanes_avx512.h"
#include "packed_linear.h"
#include "quantize_blocks.h"

namespace halfbyte {
const Kernels* avx512_kernels() {
  static const Kernels kernels = {"avx512",        quantize_rows, amax_rows,
                                  dequantize_rows, project_rows,  multiply_rows,
                                  decode_tile,     decode_panel,  multiply_panel};
  return &kernels;
}
}  // namespace halfbyte

#else

namespace halfbyte {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace halfbyte

#endif
