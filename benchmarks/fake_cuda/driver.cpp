// The CUDA driver, which Triton and PyTorch's compiler speak to without the runtime; its memory is in memory.cpp.

#include <cstdio>
#include <cstring>

#include "fake.h"

namespace {

int something;  // what the handles of contexts, modules and functions point at

template <typename HandleType>
CUresult hand_out(HandleType* to) {
  *to = reinterpret_cast<HandleType>(&something);
  return CUDA_SUCCESS;
}

CUresult answer(int* to, int value) {
  *to = value;
  return CUDA_SUCCESS;
}

}  // namespace

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* to) { return answer(to, fake::kVersion); }
API CUresult cuGetErrorString(CUresult, const char** to) {
  *to = "an error of the fake CUDA";
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult, const char** to) {
  *to = "CUDA_ERROR_OF_FAKE_CUDA";
  return CUDA_SUCCESS;
}

// The card and its context.
API CUresult cuDeviceGetCount(int* to) { return answer(to, 1); }
API CUresult cuDeviceGet(CUdevice* to, int) { return answer(to, 0); }
API CUresult cuDeviceGetName(char* to, int bytes, CUdevice) {
  snprintf(to, bytes, "%s", fake::name());
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* to, CUdevice_attribute attribute, CUdevice) {
  cudaDeviceGetAttribute(to, static_cast<cudaDeviceAttr>(attribute), 0);  // their numbers are the same
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  return answer(active, fake::opened());
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* to, CUdevice) {
  fake::enter();
  return hand_out(to);
}
API CUresult cuCtxGetCurrent(CUcontext* to) {
  if (fake::opened()) return hand_out(to);
  *to = nullptr;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* to) { return answer(to, 0); }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* to, CUlimit) {
  *to = fake::kMib;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
API CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }

// Modules and their functions.
API CUresult cuModuleLoad(CUmodule* to, const char*) { return hand_out(to); }
API CUresult cuModuleLoadData(CUmodule* to, const void*) { return hand_out(to); }
API CUresult cuModuleLoadDataEx(CUmodule* to, const void*, unsigned, CUjit_option*, void**) { return hand_out(to); }
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* to, CUmodule, const char*) { return hand_out(to); }
API CUresult cuModuleGetGlobal_v2(CUdeviceptr* to, size_t* bytes, CUmodule, const char*) {
  static char room[fake::kCopied];
  *to = reinterpret_cast<CUdeviceptr>(room);
  if (bytes) *bytes = sizeof room;
  return CUDA_SUCCESS;
}
API CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_SUCCESS; }
API CUresult cuFuncGetAttribute(int* to, CUfunction_attribute attribute, CUfunction) {
  if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) return answer(to, 32);
  return answer(to, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0);
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* to, CUfunction, int, size_t) { return answer(to, 2); }
API CUresult cuOccupancyMaxActiveClusters(int* to, CUfunction, const CUlaunchConfig*) { return answer(to, 2); }

// Launches.
API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                            void**, void**) {
  fake::launch();
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) {
  fake::launch();
  return CUDA_SUCCESS;
}
API CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       CUstream, void**) {
  fake::launch();
  return CUDA_SUCCESS;
}

// What Triton asks of an argument before it launches.
API CUresult cuPointerGetAttribute(void* to, CUpointer_attribute attribute, CUdeviceptr address) {
  if (fake::kind(reinterpret_cast<const void*>(address)) == fake::Kind::kNone) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *static_cast<CUdeviceptr*>(to) = address;
  } else {
    memset(to, 0, sizeof(int));
  }
  return CUDA_SUCCESS;
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
