// The card's memory: reserved as address space of this process, and counted on a board that all processes share.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "fake.h"

namespace {

constexpr size_t kPage = 2 * fake::kMib;  // a card hands out memory in pages of 2 MiB

// One process's place on the board; board.py reads the same 16 bytes.
struct Slot {
  std::atomic<int> process;
  std::atomic<size_t> bytes;
};
static_assert(sizeof(Slot) == 16, "board.py reads slots of 16 bytes");
constexpr int kSlots = 4096;

// kAddresses: a range of addresses whose memory is counted by its handle (cuMemCreate).
enum class Owner { kHost, kDevice, kAddresses };
struct Block {
  size_t bytes;
  Owner owner;
};
struct Handle {
  size_t bytes;
};

std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;
std::map<char*, Block> blocks;
size_t held = 0;
std::atomic<bool> context_open{false};
thread_local cudaError_t last_error = cudaSuccess;

const char* text_of(const char* variable) {
  const char* text = getenv(variable);
  if (!text) {
    fprintf(stderr, "fake_cuda: %s is not set; start with `python -m benchmarks.fake_cuda`\n", variable);
    abort();
  }
  return text;
}

size_t context() {
  static size_t bytes = strtoull(text_of("FAKE_CUDA_CONTEXT_MIB"), nullptr, 10) * fake::kMib;
  return bytes;
}

Slot* board() {
  static Slot* slots = [] {
    const char* path = text_of("FAKE_CUDA_BOARD");
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    size_t bytes = kSlots * sizeof(Slot);
    void* mapped = MAP_FAILED;
    if (file >= 0 && !ftruncate(file, bytes)) {
      mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (mapped == MAP_FAILED) {
      perror(path);
      abort();
    }
    close(file);
    return static_cast<Slot*>(mapped);
  }();
  return slots;
}

bool lives(int process) { return process && !kill(process, 0); }

// This process's slot: a new one, or one of a process that is gone. After a fork it is another process's no more.
Slot* my_slot() {
  static Slot* slot = nullptr;
  static int owner = 0;
  int me = getpid();
  if (owner == me) return slot;
  owner = me;
  slot = nullptr;
  for (int i = 0; i < kSlots && !slot; i++) {
    int was = board()[i].process.load();
    if (was != me && lives(was)) continue;
    if (was == me || board()[i].process.compare_exchange_strong(was, me)) slot = &board()[i];
  }
  return slot;
}

void tell() {
  if (Slot* slot = my_slot()) slot->bytes = held + (context_open ? context() : 0);
}

size_t used() {
  size_t sum = 0;
  for (int i = 0; i < kSlots; i++) {
    if (lives(board()[i].process)) sum += board()[i].bytes;
  }
  return sum;
}

// Addresses only: the kernel behind them gives a page of real memory when one is written, and kernels write nothing.
char* reserve(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

const Block* block_of(const void* address) {
  auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == blocks.begin()) return nullptr;
  auto found = std::prev(after);
  return static_cast<const char*>(address) < found->first + found->second.bytes ? &found->second : nullptr;
}

cudaError_t take(void** to, size_t bytes, Owner owner) {
  Guard guard(lock);
  bytes = whole_pages(bytes);
  *to = nullptr;
  if (owner == Owner::kDevice && used() + bytes > fake::total()) return fake::error(cudaErrorMemoryAllocation);
  char* at = reserve(bytes);
  if (!at) return fake::error(cudaErrorMemoryAllocation);
  blocks[at] = {bytes, owner};
  if (owner == Owner::kDevice) {
    held += bytes;
    tell();
  }
  *to = at;
  return cudaSuccess;
}

cudaError_t give(void* address) {
  if (!address) return cudaSuccess;
  Guard guard(lock);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return fake::error(cudaErrorInvalidValue);
  munmap(address, found->second.bytes);
  if (found->second.owner == Owner::kDevice) held -= found->second.bytes;
  blocks.erase(found);
  tell();
  return cudaSuccess;
}

}  // namespace

namespace fake {

const char* name() { return text_of("FAKE_CUDA_NAME"); }

bool talks() { return getenv("FAKE_CUDA_TALK") != nullptr; }

size_t total() {
  static size_t bytes = strtoull(text_of("FAKE_CUDA_MIB"), nullptr, 10) * kMib;
  return bytes;
}

bool opened() { return context_open; }

void enter() {
  if (context_open) return;
  Guard guard(lock);
  context_open = true;
  tell();
  if (talks()) fprintf(stderr, "fake_cuda: process %d opens the card\n", getpid());
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes <= kCopied && to && from) memmove(to, from, bytes);
}

cudaError_t error(cudaError_t code) { return last_error = code; }

Kind kind(const void* address) {
  Guard guard(lock);
  const Block* block = block_of(address);
  if (!block) return Kind::kNone;
  return block->owner == Owner::kHost ? Kind::kHost : Kind::kDevice;
}

}  // namespace fake

API cudaError_t cudaGetLastError() {
  cudaError_t code = last_error;
  last_error = cudaSuccess;
  return code;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }

// Taking and giving back.
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  fake::enter();
  size_t taken = used();
  *total_bytes = fake::total();
  *free_bytes = taken < *total_bytes ? *total_bytes - taken : 0;
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** to, size_t bytes) {
  fake::enter();
  return take(to, bytes, Owner::kDevice);
}
API cudaError_t cudaFree(void* address) {
  fake::enter();
  return give(address);
}
API cudaError_t cudaMallocAsync(void** to, size_t bytes, cudaStream_t) { return cudaMalloc(to, bytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return give(address); }
API cudaError_t cudaMallocManaged(void** to, size_t bytes, unsigned) { return cudaMalloc(to, bytes); }
API cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) { return take(to, bytes, Owner::kHost); }
API cudaError_t cudaMallocHost(void** to, size_t bytes) { return take(to, bytes, Owner::kHost); }
API cudaError_t cudaFreeHost(void* address) { return give(address); }
API cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void* address) {
  fake::Kind kind = fake::kind(address);
  memset(to, 0, sizeof *to);
  to->type = kind == fake::Kind::kNone     ? cudaMemoryTypeUnregistered
             : kind == fake::Kind::kDevice ? cudaMemoryTypeDevice
                                           : cudaMemoryTypeHost;
  to->devicePointer = kind == fake::Kind::kNone ? nullptr : const_cast<void*>(address);
  to->hostPointer = kind == fake::Kind::kHost ? const_cast<void*>(address) : nullptr;
  return cudaSuccess;
}

// Copying and setting.
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind way, cudaStream_t) {
  fake::enter();
  fake::copy(to, from, bytes);
  // What reads one byte asks "is the whole mask set?" of a kernel that did nothing: yes.
  if (bytes == 1 && way == cudaMemcpyDeviceToHost) *static_cast<char*>(to) = 1;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  fake::enter();
  fake::copy(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  fake::copy(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t) {
  if (width * height > fake::kCopied) return cudaSuccess;
  for (size_t row = 0; row < height; row++) {
    memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (bytes <= fake::kCopied) memset(to, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(to, value, bytes);
}
API cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) {
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** to, const void*) {
  static char room[fake::kMib];
  *to = room;
  return cudaSuccess;
}

// The driver's own pages, of which PyTorch makes segments that grow (expandable_segments).
API CUresult cuMemAddressReserve(CUdeviceptr* to, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  Guard guard(lock);
  char* at = reserve(bytes + kPage);
  if (!at) return CUDA_ERROR_OUT_OF_MEMORY;
  at = reinterpret_cast<char*>(whole_pages(reinterpret_cast<size_t>(at)));
  blocks[at] = {bytes, Owner::kAddresses};
  *to = reinterpret_cast<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  Guard guard(lock);
  blocks.erase(reinterpret_cast<char*>(address));
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* to, size_t bytes, const CUmemAllocationProp*,
                         unsigned long long) {
  fake::enter();
  Guard guard(lock);
  if (used() + bytes > fake::total()) return CUDA_ERROR_OUT_OF_MEMORY;
  held += bytes;
  tell();
  *to = reinterpret_cast<CUmemGenericAllocationHandle>(new Handle{bytes});
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle given) {
  Guard guard(lock);
  Handle* handle = reinterpret_cast<Handle*>(given);
  held -= handle->bytes;
  delete handle;
  tell();
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API CUresult cuMemGetAllocationGranularity(size_t* to, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *to = kPage;
  return CUDA_SUCCESS;
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  fake::copy(to, reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  fake::copy(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}
