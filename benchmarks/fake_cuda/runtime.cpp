// The CUDA runtime: the card's properties, streams and events, and launches of kernels that do nothing.

#include <dlfcn.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "fake.h"
#undef cudaGetDeviceProperties  // the header may have it stand for a version of it; libraries ask for the plain name

namespace {

// A GH100 as an H200 has it, whatever the card's name.
constexpr int kMajor = 9, kMinor = 0, kMultiprocessors = 132, kWarp = 32;
constexpr int kThreadsOfBlock = 1024, kThreadsOfMultiprocessor = 2048, kBlocksOfMultiprocessor = 32;
constexpr int kRegisters = 65536, kLevel2 = 60 << 20, kBus = 6144, kGridX = 2147483647, kGridYZ = 65535;
constexpr int kShared = 49152, kSharedOptin = 232448, kSharedOfMultiprocessor = 233472, kSharedReserved = 1024;
constexpr int kClockKhz = 1980000, kMemoryClockKhz = 3201000;

struct Event {
  double milliseconds;
};
Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

cudaStream_t new_stream() {
  static std::atomic<size_t> next{4096};  // above the few small numbers that name the default streams
  return reinterpret_cast<cudaStream_t>(next += 16);
}

// What `kernel<<<grid, block, shared, stream>>>` pushes before the stub that launches it, and the stub pops.
struct Call {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
constexpr int kCalls = 64;
thread_local Call calls[kCalls];
thread_local int depth = 0;

int driver_function_that_is_missing() { return CUDA_SUCCESS; }

}  // namespace

namespace fake {

cudaError_t launch() {
  enter();
  return cudaSuccess;
}

}  // namespace fake

// The card.
API cudaError_t cudaGetDeviceCount(int* to) {
  *to = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* to) {
  *to = 0;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int) {
  fake::enter();
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  fake::enter();
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* to) {
  *to = fake::kVersion;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* to) {
  *to = fake::kVersion;
  return cudaSuccess;
}
API const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "out of memory" : "an error of the fake CUDA";
}
API const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfFakeCuda";
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int) {
  memset(to, 0, sizeof *to);
  snprintf(to->name, sizeof to->name, "%s", fake::name());
  to->totalGlobalMem = fake::total();
  to->major = kMajor;
  to->minor = kMinor;
  to->multiProcessorCount = kMultiprocessors;
  to->warpSize = kWarp;
  to->maxThreadsPerBlock = kThreadsOfBlock;
  to->maxThreadsPerMultiProcessor = kThreadsOfMultiprocessor;
  to->maxBlocksPerMultiProcessor = kBlocksOfMultiprocessor;
  to->regsPerBlock = to->regsPerMultiprocessor = kRegisters;
  to->sharedMemPerBlock = kShared;
  to->sharedMemPerBlockOptin = kSharedOptin;
  to->sharedMemPerMultiprocessor = kSharedOfMultiprocessor;
  to->reservedSharedMemPerBlock = kSharedReserved;
  to->l2CacheSize = kLevel2;
  to->memoryBusWidth = kBus;
  to->totalConstMem = 65536;
  for (int i = 0; i < 3; i++) {
    to->maxThreadsDim[i] = kThreadsOfBlock;
    to->maxGridSize[i] = i ? kGridYZ : kGridX;
  }
  to->asyncEngineCount = 3;
  to->unifiedAddressing = to->canMapHostMemory = to->managedMemory = 1;
  to->concurrentKernels = to->cooperativeLaunch = to->streamPrioritiesSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* to, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *to = kThreadsOfBlock; break;
    case cudaDevAttrMaxGridDimX: *to = kGridX; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *to = kGridYZ; break;
    case cudaDevAttrMultiProcessorCount: *to = kMultiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *to = kMajor; break;
    case cudaDevAttrComputeCapabilityMinor: *to = kMinor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *to = kShared; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *to = kSharedOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *to = kSharedOfMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *to = kSharedReserved; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *to = kThreadsOfMultiprocessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *to = kBlocksOfMultiprocessor; break;
    case cudaDevAttrWarpSize: *to = kWarp; break;
    case cudaDevAttrL2CacheSize: *to = kLevel2; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *to = kRegisters; break;
    case cudaDevAttrClockRate: *to = kClockKhz; break;
    case cudaDevAttrMemoryClockRate: *to = kMemoryClockKhz; break;
    case cudaDevAttrGlobalMemoryBusWidth: *to = kBus; break;
    case cudaDevAttrCooperativeLaunch: *to = 1; break;
    default: *to = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* to, int bytes, int) {
  snprintf(to, bytes, "0000:01:00.0");
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* to, int, int) {
  *to = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

// Streams: what is asked of one is done at once.
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* to, unsigned, int) {
  fake::enter();
  *to = new_stream();
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned) { return cudaStreamCreateWithPriority(to, 0, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* to) { return cudaStreamCreateWithPriority(to, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* to) {
  *to = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* to) {
  *to = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* to, unsigned long long* number,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *to = cudaStreamCaptureStatusNone;
  if (number) *number = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

// Events: the host's clock.
API cudaError_t cudaEventCreate(cudaEvent_t* to) {
  *to = reinterpret_cast<cudaEvent_t>(new Event{now()});
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) { return cudaEventCreate(to); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event_of(event)->milliseconds = now();
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* to, cudaEvent_t from, cudaEvent_t until) {
  *to = event_of(until)->milliseconds - event_of(from)->milliseconds;
  return cudaSuccess;
}

// Kernels.
API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return fake::launch(); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return fake::launch(); }
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return fake::launch();
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return fake::launch(); }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  calls[depth++ % kCalls] = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Call call = calls[--depth % kCalls];
  *grid = call.grid;
  *block = call.block;
  *shared = call.shared;
  *static_cast<void**>(stream) = call.stream;
  return cudaSuccess;
}
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 0; }
API cudaError_t __cudaGetKernel(cudaKernel_t* to, const void* function) {
  *to = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void*) {
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = kThreadsOfBlock;
  to->numRegs = 32;
  to->binaryVersion = to->ptxVersion = 10 * kMajor + kMinor;
  to->maxDynamicSharedSizeBytes = kShared;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* to, const void*, int, size_t) {
  *to = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* to, const void*, int, size_t, unsigned) {
  *to = 2;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Where PyTorch asks for a function of the driver: ours, or one that does nothing.
API cudaError_t cudaGetDriverEntryPointByVersion(const char* wanted, void** to, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *to = dlsym(RTLD_DEFAULT, wanted);
  if (!*to) {
    if (fake::talks()) fprintf(stderr, "fake_cuda: the driver's %s is missing\n", wanted);
    *to = reinterpret_cast<void*>(driver_function_that_is_missing);
  }
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
