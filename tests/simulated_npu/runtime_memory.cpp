// Device memory is host memory of this process, known by its address.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "runtime_stream.hpp"

namespace simnpu {
namespace {

// Fresh memory holds this byte, so that a read before the first write shows.
constexpr int kPoison = 0xCB;
constexpr std::size_t kAlignment = 512;

struct Block {
  std::size_t bytes;
  Device* owner;  // null for page-locked host memory
};

std::mutex mutex;
std::map<std::uintptr_t, Block>& blocks() {
  static auto& all = *new std::map<std::uintptr_t, Block>;
  return all;
}

std::size_t capacity() {
  const char* gigabytes = std::getenv("SIMNPU_MEMORY_GB");
  return static_cast<std::size_t>(gigabytes ? std::atoi(gigabytes) : 64) << 30;
}

// The block that holds all of [pointer, pointer + bytes), or null.
const Block* find(const void* pointer, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto next = blocks().upper_bound(address);
  if (next == blocks().begin()) return nullptr;
  --next;
  return address + bytes <= next->first + next->second.bytes ? &next->second : nullptr;
}

bool page_locked(const void* pointer, std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const Block* block = find(pointer, bytes);
  return block && !block->owner;
}

aclError allocate(void** pointer, std::size_t bytes, Device* owner) {
  if (posix_memalign(pointer, kAlignment, std::max(bytes, kAlignment))) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no memory left");
  }
  if (owner) std::memset(*pointer, kPoison, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  blocks()[reinterpret_cast<std::uintptr_t>(*pointer)] = {bytes, owner};
  if (owner) owner->bytes_used += bytes;
  return ACL_SUCCESS;
}

aclError release(void* pointer, bool on_device) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks().find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == blocks().end() || on_device != (found->second.owner != nullptr)) {
      return fail(ACL_ERROR_RT_PARAM_INVALID, "freed memory that was not allocated this way");
    }
    if (on_device) found->second.owner->bytes_used -= found->second.bytes;
    blocks().erase(found);
  }
  std::free(pointer);
  return ACL_SUCCESS;
}

bool reads_device(aclrtMemcpyKind kind) {
  return kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
}

bool writes_device(aclrtMemcpyKind kind) {
  return kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
}

aclError check_copy(const void* to, std::size_t room, const void* from, std::size_t bytes,
                    aclrtMemcpyKind kind) {
  std::string wrong;
  if (bytes > room) {
    wrong = std::to_string(bytes) + " bytes into room for " + std::to_string(room);
  } else if (bytes && writes_device(kind) && device_of(to, bytes) < 0) {
    wrong = "the destination is not device memory";
  } else if (bytes && reads_device(kind) && device_of(from, bytes) < 0) {
    wrong = "the source is not device memory";
  }
  return wrong.empty() ? ACL_SUCCESS : fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy: " + wrong);
}

}  // namespace

int device_of(const void* pointer, std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const Block* block = find(pointer, bytes);
  return block && block->owner ? block->owner->id : -1;
}

}  // namespace simnpu

using simnpu::fail;

SIMNPU_API aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  simnpu::Device* owner = simnpu::current_device();
  if (!owner) return ACL_ERROR_RT_CONTEXT_NULL;
  if (owner->bytes_used + bytes > simnpu::capacity()) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device " + std::to_string(owner->id) + " holds " +
                                                    std::to_string(owner->bytes_used) +
                                                    " bytes, no room for " + std::to_string(bytes) +
                                                    " more; SIMNPU_MEMORY_GB sets its size");
  }
  return simnpu::allocate(pointer, bytes, owner);
}

SIMNPU_API aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, bytes, policy);
}

// Frees at once, without waiting for tasks that use the memory (CANN runtime API, aclrtFree).
SIMNPU_API aclError aclrtFree(void* pointer) {
  return simnpu::release(pointer, true);
}

SIMNPU_API aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return simnpu::allocate(pointer, bytes, nullptr);
}

SIMNPU_API aclError aclrtFreeHost(void* pointer) {
  return simnpu::release(pointer, false);
}

SIMNPU_API aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  const int device = simnpu::device_of(pointer, 1);
  if (device >= 0) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = device;
  } else {
    attributes->location.type = simnpu::page_locked(pointer, 1)
                                    ? ACL_MEM_LOCATION_TYPE_HOST
                                    : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  }
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  const simnpu::Device* device = simnpu::current_device();
  if (!device) return ACL_ERROR_RT_CONTEXT_NULL;
  *total = simnpu::capacity();
  *free = *total - device->bytes_used;
  return ACL_SUCCESS;
}

// Synchronous for the host, but in no order with any stream: who wants order synchronises first,
// as torch_npu does before it copies to the host.
SIMNPU_API aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes,
                                aclrtMemcpyKind kind) {
  if (const aclError code = simnpu::check_copy(to, room, from, bytes, kind)) return code;
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

// In stream order. Returns only after the copy when the host side is not page-locked, and has no
// host to host kind: CANN 8.5 runtime API, aclrtMemcpyAsync.
SIMNPU_API aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes,
                                     aclrtMemcpyKind kind, aclrtStream stream) {
  if (kind == ACL_MEMCPY_HOST_TO_HOST) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtMemcpyAsync: host to host");
  }
  if (const aclError code = simnpu::check_copy(to, room, from, bytes, kind)) return code;
  const aclError code = simnpu::submit(
      stream,
      [=] {
        std::memmove(to, from, bytes);
        return ACL_SUCCESS;
      },
      "aclrtMemcpyAsync");
  const bool pageable = (kind == ACL_MEMCPY_HOST_TO_DEVICE && !simnpu::page_locked(from, bytes)) ||
                        (kind == ACL_MEMCPY_DEVICE_TO_HOST && !simnpu::page_locked(to, bytes));
  return code || !pageable ? code : simnpu::stream_of(stream).synchronise(-1);
}

SIMNPU_API aclError aclrtMemset(void* pointer, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset: more bytes than room");
  std::memset(pointer, value, bytes);
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtMemsetAsync(void* pointer, size_t room, int32_t value, size_t bytes,
                                     aclrtStream stream) {
  return simnpu::submit(
      stream, [=] { return aclrtMemset(pointer, room, value, bytes); }, "aclrtMemsetAsync");
}
