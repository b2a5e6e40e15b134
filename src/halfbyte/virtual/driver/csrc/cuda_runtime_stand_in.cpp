// The host-side CUDA entry points that programs compiled by CuTe DSL call, each forwarded by name.
//
// CuTe DSL 4.8 compiles host code that calls C symbols with a leading underscore (`_cudaMalloc` for
// cudaMalloc, `_cuLibraryGetKernel` for cuLibraryGetKernel) and resolves them in the libraries of
// CUTE_DSL_LIBS. Here every one packs its arguments into 64-bit words and calls one function, set by
// halfbyte.virtual.driver.library: what the call means is decided there, in one place and in Python.
// Without such a function every call answers "not supported", so that code which runs while the
// interpreter ends stays harmless.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 801;  // cudaErrorNotSupported

using Hook = int (*)(const char* name, const uint64_t* words, int32_t count);
using SetErrorParts = void (*)(const char* kind, const char** parts, int32_t count);
using SetError = void (*)(const char* kind, const char* message);
using InitLibrary = int32_t (*)(void** library);
using Pointer = void*;
using Text = const char*;
using LoadToDevice = int32_t (*)(void** library, int32_t device);

std::atomic<Hook> hook{nullptr};
std::recursive_mutex load_mutex;
std::string error_kind, error_text;

uint64_t word(const void* value) { return reinterpret_cast<uintptr_t>(value); }
uint64_t word(int64_t value) { return static_cast<uint64_t>(value); }
uint64_t word(uint64_t value) { return value; }
uint64_t word(int32_t value) { return static_cast<uint64_t>(static_cast<int64_t>(value)); }
uint64_t word(uint32_t value) { return value; }
template <typename Function>
uint64_t function_word(Function value) {
  return reinterpret_cast<uintptr_t>(value);
}

template <typename... Values>
int forward(const char* name, Values... values) {
  const Hook call = hook.load();
  if (call == nullptr) return kNotSupported;
  const uint64_t words[] = {word(values)..., 0};
  return call(name, words, static_cast<int32_t>(sizeof...(values)));
}

const char* error_name(int code) {
  switch (code) {
    case 0: return "cudaSuccess";
    case 1: return "cudaErrorInvalidValue";
    case 2: return "cudaErrorMemoryAllocation";
    case 209: return "cudaErrorNoKernelImageForDevice";
    case 500: return "cudaErrorSymbolNotFound";
    case 719: return "cudaErrorLaunchFailure";
    case 720: return "cudaErrorCooperativeLaunchTooLarge";
    case 801: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}

// A plain error code is raised as CuTe DSL's own class, which reads the code back from the text.
Text choose_kind() { return error_kind.empty() ? "CUDADialectError" : error_kind.c_str(); }
std::string make_text(int code) {
  return error_kind.empty() ? "CUDA Error Code: " + std::to_string(code) : error_text;
}

}  // namespace

EXPORTED void halfbyte_set_hook(Hook call) { hook.store(call); }

// The error that the next failing call through TVM FFI raises: `kind` names a registered class,
// an empty one stands for the plain error code.
EXPORTED void halfbyte_set_error(const char* kind, const char* text) {
  error_kind = kind;
  error_text = text;
}

// Kernel images.
EXPORTED int _cudaLibraryLoadData(Pointer* library, const void* image, Pointer, Pointer, int32_t,
                                  Pointer, Pointer, int32_t) {
  return forward("LibraryLoadData", library, image);
}
EXPORTED int _cuLibraryLoadData(Pointer* library, const void* image, Pointer, Pointer, int32_t,
                                Pointer, Pointer, int32_t) {
  return forward("LibraryLoadData", library, image);
}
EXPORTED int _cudaLibraryLoadFromFile(Pointer* library, Text path, Pointer, Pointer, int32_t,
                                      Pointer, Pointer, int32_t) {
  return forward("LibraryLoadFromFile", library, path);
}
EXPORTED int _cuLibraryLoadFromFile(Pointer* library, Text path, Pointer, Pointer, int32_t,
                                    Pointer, Pointer, int32_t) {
  return forward("LibraryLoadFromFile", library, path);
}
EXPORTED int _cudaLibraryUnload(Pointer library) { return forward("LibraryUnload", library); }
EXPORTED int _cuLibraryUnload(Pointer library) { return forward("LibraryUnload", library); }
EXPORTED int _cudaLibraryGetKernel(Pointer* kernel, Pointer library, Text name) {
  return forward("LibraryGetKernel", kernel, library, name);
}
EXPORTED int _cuLibraryGetKernel(Pointer* kernel, Pointer library, Text name) {
  return forward("LibraryGetKernel", kernel, library, name);
}
EXPORTED int _cudaLibraryGetKernelCount(uint32_t* count, Pointer library) {
  return forward("LibraryGetKernelCount", count, library);
}
EXPORTED int _cuLibraryGetKernelCount(uint32_t* count, Pointer library) {
  return forward("LibraryGetKernelCount", count, library);
}
EXPORTED int _cudaLibraryEnumerateKernels(Pointer* kernels, uint32_t count, Pointer library) {
  return forward("LibraryEnumerateKernels", kernels, count, library);
}
EXPORTED int _cuLibraryEnumerateKernels(Pointer* kernels, uint32_t count, Pointer library) {
  return forward("LibraryEnumerateKernels", kernels, count, library);
}
EXPORTED int _cudaLibraryGetGlobal(Pointer* address, size_t* bytes, Pointer library, Text name) {
  return forward("LibraryGetGlobal", address, bytes, library, name);
}
EXPORTED int _cuLibraryGetGlobal(Pointer* address, size_t* bytes, Pointer library, Text name) {
  return forward("LibraryGetGlobal", address, bytes, library, name);
}
EXPORTED int _cudaLibraryGetManaged(Pointer* address, size_t* bytes, Pointer library, Text name) {
  return forward("LibraryGetGlobal", address, bytes, library, name);
}
EXPORTED int _cuLibraryGetManaged(Pointer* address, size_t* bytes, Pointer library, Text name) {
  return forward("LibraryGetGlobal", address, bytes, library, name);
}
EXPORTED int _cudaLibraryGetUnifiedFunction(Pointer* function, Pointer library, Text name) {
  return forward("LibraryGetUnifiedFunction", function, library, name);
}
EXPORTED int _cuLibraryGetUnifiedFunction(Pointer* function, Pointer library, Text name) {
  return forward("LibraryGetUnifiedFunction", function, library, name);
}
EXPORTED int _cuLibraryGetModule(Pointer* module, Pointer library) {
  return forward("LibraryGetModule", module, library);
}

// Kernels and launches.
EXPORTED int _cudaLaunchKernelEx(const void* config, const void* kernel, Pointer* arguments) {
  return forward("LaunchKernelEx", config, kernel, arguments);
}
EXPORTED int _cudaLaunchKernel(const void* kernel, int32_t grid_x, int32_t grid_y, int32_t grid_z,
                               int32_t block_x, int32_t block_y, int32_t block_z, Pointer stream,
                               int64_t shared_bytes, Pointer* arguments) {
  return forward("LaunchKernel", kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, stream,
                 shared_bytes, arguments);
}
EXPORTED int _cuKernelGetAttribute(int32_t* value, int32_t attribute, Pointer kernel, int32_t) {
  return forward("KernelGetAttribute", value, attribute, kernel);
}
EXPORTED int _cudaKernelSetAttributeForDevice(Pointer kernel, int32_t attribute, int32_t value,
                                              int32_t) {
  return forward("KernelSetAttribute", kernel, attribute, value);
}
EXPORTED int _cudaFuncSetAttribute(Pointer kernel, int32_t attribute, int32_t value) {
  return forward("KernelSetAttribute", kernel, attribute, value);
}
EXPORTED int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int32_t* blocks, Pointer kernel,
                                                            int32_t threads, int64_t shared_bytes) {
  return forward("OccupancyMaxActiveBlocks", blocks, kernel, threads, shared_bytes);
}
EXPORTED int _cudaOccupancyMaxActiveClusters(int32_t* clusters, Pointer kernel,
                                             const void* config) {
  return forward("OccupancyMaxActiveClusters", clusters, kernel, config);
}
EXPORTED int _cuTensorMapEncodeTiled(Pointer map, int32_t type, uint32_t rank, Pointer address,
                                     const uint64_t* sizes, const uint64_t* strides,
                                     const uint32_t* box, const uint32_t* element_strides,
                                     int32_t interleave, int32_t swizzle, int32_t l2_promotion,
                                     int32_t fill) {
  return forward("TensorMapEncodeTiled", map, type, rank, address, sizes, strides, box,
                 element_strides, interleave, swizzle, l2_promotion, fill);
}

// The device.
EXPORTED int _cuDeviceGet(int32_t* device, int32_t ordinal) {
  return forward("DeviceGet", device, ordinal);
}
EXPORTED int _cudaGetDevice(int32_t* device) { return forward("GetDevice", device); }
EXPORTED int _cudaSetDevice(int32_t device) { return forward("SetDevice", device); }
EXPORTED int _cudaGetDeviceCount(int32_t* count) { return forward("GetDeviceCount", count); }
EXPORTED int _cudaDeviceGetAttribute(int32_t* value, int32_t attribute, int32_t) {
  return forward("DeviceGetAttribute", value, attribute);
}
EXPORTED int _cudaGetDeviceProperties(Pointer properties, int32_t) {
  return forward("GetDeviceProperties", properties);
}
EXPORTED int _cudaDeviceSynchronize() { return forward("DeviceSynchronize"); }
EXPORTED int _cudaGetLastError() { return kSuccess; }
EXPORTED int _cudaPeekAtLastError() { return kSuccess; }
EXPORTED Text _cudaGetErrorName(int32_t code) { return error_name(code); }
EXPORTED Text _cudaGetErrorString(int32_t code) { return error_name(code); }
EXPORTED int _cudaProfilerStart() { return kSuccess; }
EXPORTED int _cudaProfilerStop() { return kSuccess; }

// Memory.
EXPORTED int _cudaMalloc(Pointer* address, size_t bytes) {
  return forward("Malloc", address, bytes);
}
EXPORTED int _cudaMallocAsync(Pointer* address, size_t bytes, Pointer) {
  return forward("Malloc", address, bytes);
}
EXPORTED int _cudaMallocManaged(Pointer* address, size_t bytes, uint32_t) {
  return forward("Malloc", address, bytes);
}
EXPORTED int _cudaMallocHost(Pointer* address, size_t bytes) {
  return forward("Malloc", address, bytes);
}
EXPORTED int _cudaFree(Pointer address) { return forward("Free", address); }
EXPORTED int _cudaFreeAsync(Pointer address, Pointer) { return forward("Free", address); }
EXPORTED int _cudaFreeHost(Pointer address) { return forward("Free", address); }
EXPORTED int _cudaMemcpy(Pointer target, const void* source, size_t bytes, int32_t) {
  return forward("Memcpy", target, source, bytes);
}
EXPORTED int _cudaMemcpyAsync(Pointer target, const void* source, size_t bytes, int32_t, Pointer) {
  return forward("Memcpy", target, source, bytes);
}
EXPORTED int _cudaMemset(Pointer target, int32_t value, size_t bytes) {
  return forward("Memset", target, value, bytes);
}
EXPORTED int _cudaMemsetAsync(Pointer target, int32_t value, size_t bytes, Pointer) {
  return forward("Memset", target, value, bytes);
}

// Streams, events and graphs.
EXPORTED int _cudaStreamCreate(Pointer* stream) { return forward("StreamCreate", stream); }
EXPORTED int _cudaStreamDestroy(Pointer stream) { return forward("StreamDestroy", stream); }
EXPORTED int _cudaStreamSynchronize(Pointer stream) { return forward("StreamSynchronize", stream); }
EXPORTED int _cudaStreamWaitEvent(Pointer stream, Pointer event, uint32_t) {
  return forward("StreamWaitEvent", stream, event);
}
EXPORTED int _cudaStreamAddCallback(Pointer stream, void (*callback)(Pointer, int, Pointer),
                                    Pointer argument, uint32_t) {
  return forward("StreamAddCallback", stream, function_word(callback), argument);
}
EXPORTED int _cudaStreamBeginCapture(Pointer stream, int32_t) {
  return forward("StreamBeginCapture", stream);
}
EXPORTED int _cudaStreamEndCapture(Pointer stream, Pointer* graph) {
  return forward("StreamEndCapture", stream, graph);
}
EXPORTED int _cudaEventCreate(Pointer* event) { return forward("EventCreate", event); }
EXPORTED int _cudaEventCreateWithFlags(Pointer* event, uint32_t) {
  return forward("EventCreate", event);
}
EXPORTED int _cudaEventDestroy(Pointer event) { return forward("EventDestroy", event); }
EXPORTED int _cudaEventRecord(Pointer event, Pointer stream) {
  return forward("EventRecord", event, stream);
}
EXPORTED int _cudaEventSynchronize(Pointer event) { return forward("EventSynchronize", event); }
EXPORTED int _cudaEventElapsedTime(float* milliseconds, Pointer start, Pointer end) {
  return forward("EventElapsedTime", milliseconds, start, end);
}
EXPORTED int _cuEventCreate(Pointer* event, uint32_t) { return forward("EventCreate", event); }
EXPORTED int _cuEventDestroy(Pointer event) { return forward("EventDestroy", event); }
EXPORTED int _cuEventRecord(Pointer event, Pointer stream) {
  return forward("EventRecord", event, stream);
}
EXPORTED int _cuEventRecordWithFlags(Pointer event, Pointer stream, uint32_t) {
  return forward("EventRecord", event, stream);
}
EXPORTED int _cuEventQuery(Pointer) { return kSuccess; }
EXPORTED int _cuEventSynchronize(Pointer event) { return forward("EventSynchronize", event); }
EXPORTED int _cuEventElapsedTime(float* milliseconds, Pointer start, Pointer end) {
  return forward("EventElapsedTime", milliseconds, start, end);
}
EXPORTED int _cudaGraphInstantiate(Pointer* executable, Pointer graph, uint64_t) {
  return forward("GraphInstantiate", executable, graph);
}
EXPORTED int _cudaGraphLaunch(Pointer executable, Pointer stream) {
  return forward("GraphLaunch", executable, stream);
}
EXPORTED int _cudaGraphDestroy(Pointer graph) { return forward("GraphDestroy", graph); }
EXPORTED int _cudaGraphExecDestroy(Pointer executable) {
  return forward("GraphExecDestroy", executable);
}

// What the compiled wrappers of TVM FFI call around a launch.
EXPORTED Text cuda_dialect_get_error_name(int32_t code) { return error_name(code); }
EXPORTED Text cuda_dialect_get_error_string(int32_t code) { return error_name(code); }
EXPORTED void cuda_dialect_assert_success(int32_t) {}
EXPORTED void cuda_dialect_print_on_error(int32_t) {}

EXPORTED int cuda_dialect_init_library_once(Pointer* state, InitLibrary init, LoadToDevice load,
                                            SetError set_error) {
  const std::lock_guard<std::recursive_mutex> lock(load_mutex);
  if (*state != nullptr) return kSuccess;
  Pointer library = nullptr;
  int code = init(&library);
  if (code == kSuccess && load != nullptr) code = load(&library, 0);
  if (code == kSuccess) {
    *state = library;
    return kSuccess;
  }
  set_error(choose_kind(), make_text(code).c_str());
  return code;
}

EXPORTED void cuda_dialect_unload_library_once(Pointer* state) {
  const std::lock_guard<std::recursive_mutex> lock(load_mutex);
  if (*state == nullptr) return;
  forward("LibraryUnload", *state);
  *state = nullptr;
}

EXPORTED void CuteDSLRT_TVMFFISetRaisedCudaError(SetErrorParts set_error, int32_t code) {
  const std::string text = make_text(code);
  const char* parts[] = {text.c_str()};
  set_error(choose_kind(), parts, 1);
}

// The refusal of a launch configuration, checked by the wrapper before the launch; the fields are
// those that CuTe DSL's CUDADialectError reads back from the message.
EXPORTED void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    SetErrorParts set_error, int32_t grid_x, int32_t grid_y, int32_t grid_z, int32_t block_x,
    int32_t block_y, int32_t block_z, int32_t block_threads, int64_t shared_bytes, int32_t device,
    int32_t max_threads, int32_t max_block_x, int32_t max_block_y, int32_t max_block_z,
    int32_t max_grid_x, int32_t max_grid_y, int32_t max_grid_z, int32_t max_shared,
    int32_t max_shared_optin, Text violation, Text source_file, int32_t source_line,
    int32_t source_column, int32_t source_end_column) {
  const auto triple = [](int32_t x, int32_t y, int32_t z) {
    return std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z);
  };
  std::string text = "CUDA Error Code: 1 ;kind=cuda_launch;grid=" + triple(grid_x, grid_y, grid_z);
  const auto add = [&text](Text name, const std::string& value) {
    text += std::string(";") + name + "=" + value;
  };
  add("block", triple(block_x, block_y, block_z));
  add("block_threads", std::to_string(block_threads));
  add("dynamic_smem_bytes", std::to_string(shared_bytes));
  add("device", std::to_string(device));
  add("max_threads_per_block", std::to_string(max_threads));
  add("max_block_dim", triple(max_block_x, max_block_y, max_block_z));
  add("max_grid_dim", triple(max_grid_x, max_grid_y, max_grid_z));
  add("max_shared_mem_per_block_bytes", std::to_string(max_shared));
  add("max_shared_mem_per_block_optin_bytes", std::to_string(max_shared_optin));
  add("violation", violation == nullptr ? "" : violation);
  add("source_file", source_file == nullptr ? "" : source_file);
  add("source_line", std::to_string(source_line));
  add("source_col", std::to_string(source_column));
  add("source_end_col", std::to_string(source_end_column));
  const char* parts[] = {text.c_str()};
  set_error("CUDADialectError", parts, 1);
}
