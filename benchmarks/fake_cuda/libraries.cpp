// The parts of cuBLAS and NVML that must answer something. All other functions of cuBLAS that PyTorch asks for are
// written beside this file when it is built: weak ones that return success, so that those here come first.
// Without their headers: those of cuBLAS need one that PyTorch does not bring, and nvml.h is in none of its packages.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "fake.h"

namespace {

constexpr int kSuccess = 0;       // of both
constexpr int kNotSupported = 3;  // NVML_ERROR_NOT_SUPPORTED

// cublasLtMatmulHeuristicResult_t
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

int make(void** to) {
  *to = calloc(1, 64);
  return kSuccess;
}

int destroy(void* given) {
  free(given);
  return kSuccess;
}

}  // namespace

// cuBLAS
API int cublasCreate_v2(void** to) { return make(to); }
API int cublasDestroy_v2(void* handle) { return destroy(handle); }
API int cublasGetMathMode(void*, int* to) {
  *to = 0;  // CUBLAS_DEFAULT_MATH
  return kSuccess;
}
API int cublasGetPointerMode_v2(void*, int* to) {
  *to = 0;  // CUBLAS_POINTER_MODE_HOST
  return kSuccess;
}
API int cublasLtCreate(void** to) { return make(to); }
API int cublasLtMatmulDescCreate(void** to, int, int) { return make(to); }
API int cublasLtMatmulDescDestroy(void* given) { return destroy(given); }
API int cublasLtMatmulPreferenceCreate(void** to) { return make(to); }
API int cublasLtMatmulPreferenceDestroy(void* given) { return destroy(given); }
API int cublasLtMatrixLayoutCreate(void** to, int, uint64_t, uint64_t, int64_t) { return make(to); }
API int cublasLtMatrixLayoutDestroy(void* given) { return destroy(given); }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* to,
                                       int* found) {
  to[0] = {};
  *found = 1;
  return kSuccess;
}

// NVML: whether there is a card, asked without opening it.
API int nvmlInit() { return kSuccess; }
API int nvmlInit_v2() { return kSuccess; }
API int nvmlShutdown() { return kSuccess; }
API int nvmlDeviceGetCount_v2(int* to) {
  *to = 1;
  return kSuccess;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** to) {
  static int card;
  *to = &card;
  return kSuccess;
}
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* found, void*) {
  *found = 0;
  return kSuccess;
}
API int nvmlSystemGetCudaDriverVersion_v2(int* to) {
  *to = fake::kVersion;
  return kSuccess;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotSupported; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotSupported; }
API int nvmlDeviceGetGpuFabricInfoV(void*, char* to) {
  to[28] = 0;  // nvmlGpuFabricInfoV_t.state: NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
  return kSuccess;
}
