// The kernels for every CPU: compiled with the compiler's default instruction set.
#include "lanes_generic.h"
#include "packed_linear.h"
#include "quantize_blocks.h"

namespace halfbyte {

const Kernels* generic_kernels() {
  static const Kernels kernels = {"generic",        quantize_rows, amax_rows,
                                  dequantize_rows, project_rows,  multiply_rows,
                                  decode_tile,     decode_panel,  multiply_panel};
  return &kernels;
}

}  // namespace halfbyte
