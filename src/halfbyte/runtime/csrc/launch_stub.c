/* Linked into every compiled kernel: launches that can be left out, and where CUDA calls go.
 *
 * The kernel's object file calls `_cudaLaunchKernelEx`; the linker's --wrap sends the call here.
 * With HALFBYTE_STATIC_RUNTIME the CUDA calls come from CuTe DSL's static archive, which lacks the
 * two functions at the end that turn a CUDA error into TVM FFI's. Without it they are forwarded to
 * the stand-in for the CUDA runtime.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

static __thread int32_t skips_launches;

/* TVMFFIAny of tvm/ffi/c_api.h: type 0 is None, an integer's value is in `value`. */
typedef struct {
  int32_t type;
  uint32_t padding;
  int64_t value;
} tvm_ffi_any;

/* A function for TVM FFI with one integer. While that is not 0, a call of this thread does
 * everything but the launch: it checks its arguments and loads the kernel onto the device, which is
 * not allowed while a CUDA graph is captured. */
EXPORTED int __tvm_ffi_halfbyte_skip_launches(void* self, const tvm_ffi_any* arguments,
                                              int32_t count, tvm_ffi_any* result) {
  (void)self;
  skips_launches = count == 1 && arguments[0].value != 0;
  *result = (tvm_ffi_any){0, 0, 0};
  return 0;
}

extern int __real__cudaLaunchKernelEx(const void* config, const void* kernel, void** arguments);

HIDDEN int __wrap__cudaLaunchKernelEx(const void* config, const void* kernel, void** arguments) {
  return skips_launches ? 0 : __real__cudaLaunchKernelEx(config, kernel, arguments);
}

#ifdef HALFBYTE_STATIC_RUNTIME
typedef void (*set_error_parts)(const char* kind, const char** parts, int32_t count);

extern const char* cudaGetErrorName(int code);
extern const char* cudaGetErrorString(int code);

HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaError(set_error_parts set_error, int32_t code) {
  const char* parts[] = {"CUDA: ", cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
  set_error("RuntimeError", parts, 4);
}

HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    set_error_parts set_error, int32_t grid_x, int32_t grid_y, int32_t grid_z, int32_t block_x,
    int32_t block_y, int32_t block_z, int32_t block_threads, int64_t shared_bytes, int32_t device,
    int32_t max_threads, int32_t max_block_x, int32_t max_block_y, int32_t max_block_z,
    int32_t max_grid_x, int32_t max_grid_y, int32_t max_grid_z, int32_t max_shared,
    int32_t max_shared_optin, const char* violation, const char* source_file, int32_t source_line,
    int32_t source_column, int32_t source_end_column) {
  char sizes[256];
  snprintf(sizes, sizeof sizes,
           "grid %d x %d x %d, block %d x %d x %d, %lld bytes of shared memory on device %d, which "
           "allows %d threads and %d bytes",
           grid_x, grid_y, grid_z, block_x, block_y, block_z, (long long)shared_bytes, device,
           max_threads, max_shared_optin);
  const char* parts[] = {"the launch is refused: ", violation ? violation : "", ": ", sizes};
  set_error("RuntimeError", parts, 4);
}

#else /* the virtual GPU's variant */

#include "stand_in_calls.h"

/* CuTe DSL loads its own runtime with the same names for the whole process, so that the dynamic
 * linker could choose the wrong one. Every call is a jump through a slot that is filled with the
 * stand-in's function; whatever arguments it has stay where they are. */
static int answer_not_supported(void) { return 801; /* cudaErrorNotSupported */ }

#if defined(__x86_64__)
#define JUMP(name) "  jmp *halfbyte_slot_" #name "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(name)                                 \
  "  adrp x16, halfbyte_slot_" #name "\n"          \
  "  ldr x16, [x16, :lo12:halfbyte_slot_" #name "]\n" \
  "  br x16\n"
#else
#error "kernels are linked on x86-64 and 64-bit Arm: the hosts that CUDA has"
#endif

#define FORWARD(name)                                                   \
  HIDDEN int (*halfbyte_slot_##name)(void) = answer_not_supported;      \
  __asm__(".text\n  .globl " #name "\n  .hidden " #name "\n"            \
          "  .type " #name ", %function\n" #name ":\n" JUMP(name)       \
          "  .size " #name ", . - " #name "\n");
STAND_IN_CALLS(FORWARD)

typedef struct {
  const char* name;
  int (**slot)(void);
} forwarded_call;
#define LIST(name) {#name, &halfbyte_slot_##name},
static const forwarded_call forwarded_calls[] = {STAND_IN_CALLS(LIST)};

/* A function for TVM FFI with one integer, the stand-in's handle from dlopen; returns how many of
 * the calls the stand-in does not have. */
EXPORTED int __tvm_ffi_halfbyte_connect(void* self, const tvm_ffi_any* arguments, int32_t count,
                                        tvm_ffi_any* result) {
  (void)self;
  void* library = count == 1 ? (void*)(intptr_t)arguments[0].value : NULL;
  int64_t missing = 0;
  for (size_t i = 0; i < sizeof forwarded_calls / sizeof forwarded_calls[0]; ++i) {
    void* found = library ? dlsym(library, forwarded_calls[i].name) : NULL;
    if (found == NULL)
      ++missing;
    else
      *(void**)forwarded_calls[i].slot = found;
  }
  *result = (tvm_ffi_any){1, 0, missing};
  return 0;
}
#endif
