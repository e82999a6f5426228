#include "hccl_launch.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <thread>

namespace simnpu::hccl {
namespace {

constexpr int kPoison = 0xCB;

std::chrono::milliseconds delay() {
  const char* milliseconds = std::getenv("SIMNPU_HCCL_DELAY_MS");
  return std::chrono::milliseconds(milliseconds && asynchronous() ? std::atoi(milliseconds) : 0);
}

bool on_device(const Region& region) {
  return region.bytes == 0 || device_of(region.data, region.bytes) >= 0;
}

bool overlap(const Region& a, const Region& b) {
  return a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

// A failed collective shows as a task of the stream that failed, by the names of rt_error_codes.h.
aclError runtime_code(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS:
      return ACL_SUCCESS;
    case HCCL_E_TIMEOUT:
    case HCCL_E_REMOTE:
      return ACL_ERROR_RT_TASK_TIMEOUT;
    default:
      return ACL_ERROR_RT_INTERNAL_ERROR;
  }
}

// Fills the receive regions in stream order and returns once that is done; what is sent from inside
// them is kept in a copy.
aclError poison(aclrtStream stream, const char* name, Region send,
                const std::vector<Region>& receives, std::shared_ptr<std::vector<char>> copy) {
  // Destroyed with the task, run or not, so that the wait below always ends.
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> finished = done->get_future();
  const aclError code = submit(
      stream,
      [=, done = std::move(done)] {
        for (const Region& region : receives) {
          if (overlap(send, region)) copy->assign(send.data, send.data + send.bytes);
        }
        for (const Region& region : receives) std::memset(region.data, kPoison, region.bytes);
        return ACL_SUCCESS;
      },
      name);
  finished.wait();
  return code;
}

}  // namespace

Handle& handle_of(HcclComm communicator) {
  return *static_cast<Handle*>(communicator);
}

HcclResult refuse(HcclResult code, const std::string& text) {
  set_error("simnpu: HCCL: " + text);
  return code;
}

HcclResult check_type(HcclDataType type) {
  if (element_size(type)) return HCCL_SUCCESS;
  return refuse(HCCL_E_NOT_SUPPORT, std::string("data type ") + name_of(type));
}

HcclResult check_reduction(HcclDataType type, HcclReduceOp reduction) {
  if (reduces(type) && reduction <= HCCL_REDUCE_MIN) return HCCL_SUCCESS;
  return refuse(HCCL_E_NOT_SUPPORT, std::string("reduction ") + name_of(reduction) + " of " +
                                        name_of(type) +
                                        "; reductions take int8, int16, int32, int64, float16, "
                                        "float32 and bfloat16");
}

HcclResult check_rank(const Communicator& communicator, std::uint32_t rank) {
  if (rank < communicator.num_ranks) return HCCL_SUCCESS;
  return refuse(HCCL_E_PARA, "rank " + std::to_string(rank) + " of " +
                                 std::to_string(communicator.num_ranks) + " ranks");
}

HcclResult launch(HcclComm communicator, aclrtStream stream, const char* name, Region send,
                  std::vector<Region> receives, Body body) {
  if (!on_device(send) || !std::all_of(receives.begin(), receives.end(), on_device)) {
    return refuse(HCCL_E_PTR, std::string(name) + ": a buffer is not device memory");
  }
  const Handle handle = handle_of(communicator);
  auto copy = std::make_shared<std::vector<char>>();
  const auto held_back = delay();
  if (held_back.count() > 0 && poison(stream, name, send, receives, copy)) return HCCL_E_RUNTIME;
  const aclError code = submit(
      stream,
      [=] {
        std::this_thread::sleep_for(held_back);
        return runtime_code(body(*handle, copy->empty() ? send.data : copy->data()));
      },
      name);
  if (code == ACL_SUCCESS) return HCCL_SUCCESS;
  return handle->failure() ? handle->failure() : HCCL_E_RUNTIME;
}

}  // namespace simnpu::hccl
