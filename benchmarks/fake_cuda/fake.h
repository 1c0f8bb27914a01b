// What the parts of the fake CUDA share: how a function is exported, and what memory.cpp knows of the card.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

namespace fake {

constexpr size_t kMib = size_t(1) << 20;
constexpr int kVersion = 13000;  // of the driver and of the runtime: CUDA 13.0

// The card's name (FAKE_CUDA_NAME).
const char* name();

// Whether to say on stderr what is of interest to who works on this (FAKE_CUDA_TALK).
bool talks();

// Memory of the whole card (FAKE_CUDA_MIB).
size_t total();

// A process's first use of the card opens its context, which takes memory of its own (FAKE_CUDA_CONTEXT_MIB).
void enter();
bool opened();

// Copies and sets above 64 KiB are not done: their values would be read by kernels, and kernels do nothing.
constexpr size_t kCopied = size_t(1) << 16;
void copy(void* to, const void* from, size_t bytes);

// What the runtime answers from cudaGetLastError.
cudaError_t error(cudaError_t code);

// Whether an address lies in memory reserved here.
enum class Kind { kNone, kHost, kDevice };
Kind kind(const void* address);

// A kernel is launched, by whichever of the interfaces.
cudaError_t launch();

}  // namespace fake
