// libhccl.so: communicators, and sends and receives.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "hccl_launch.hpp"
#include "third_party/hccl/inc/hccl/hccl.h"

using namespace simnpu::hccl;

namespace {

HcclResult create(const std::string& name, uint32_t rank, uint32_t num_ranks, HcclComm* comm) {
  try {
    *comm = new Handle(std::make_shared<Communicator>(name, rank, num_ranks));
    return HCCL_SUCCESS;
  } catch (const std::exception& error) {
    // The code of a device when ranks do not come (CANN error code reference).
    simnpu::set_error("EI0006: Getting socket times out. Reason: rank " + std::to_string(rank) +
                      " of " + std::to_string(num_ranks) + ", communicator " + name + ": " +
                      error.what());
    return HCCL_E_TIMEOUT;
  }
}

struct Queued {
  HcclSendRecvItem item;
  HcclComm comm;
  aclrtStream stream;
};

// Between HcclGroupStart and HcclGroupEnd sends and receives wait, to happen together.
thread_local int group_depth = 0;
thread_local std::vector<Queued> queued;

HcclResult pass(std::vector<HcclSendRecvItem> items, HcclComm comm, aclrtStream stream) {
  const Communicator& group = *handle_of(comm);
  std::vector<Region> receives;
  for (const HcclSendRecvItem& item : items) {
    if (const HcclResult code = check_type(item.dataType)) return code;
    if (const HcclResult code = check_rank(group, item.remoteRank)) return code;
    if (item.remoteRank == group.rank) return refuse(HCCL_E_PARA, "a rank sends to itself");
    const Region part{static_cast<char*>(item.buf), item.count * element_size(item.dataType)};
    if (part.bytes && simnpu::device_of(part.data, part.bytes) < 0) {
      return refuse(HCCL_E_PTR, "send or receive: a buffer is not device memory");
    }
    if (item.sendRecvType == HCCL_RECV) receives.push_back(part);
  }
  return launch(
      comm, stream, "HcclSend/HcclRecv", {}, receives,
      [items = std::move(items)](Communicator& ranks, const char*) { return ranks.pass(items); });
}

HcclResult pass_or_queue(const HcclSendRecvItem& item, HcclComm comm, aclrtStream stream) {
  if (group_depth == 0) return pass({item}, comm, stream);
  queued.push_back({item, comm, stream});
  return HCCL_SUCCESS;
}

}  // namespace

// No optional feature of a later HCCL is offered.
SIMNPU_API uint32_t HcclGetCommConfigCapability() {
  return HCCL_COMM_CONFIG_RESERVED;
}

SIMNPU_API HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) {
  return HCCL_SUCCESS;
}

SIMNPU_API HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<unsigned> created{0};
  std::memset(info, 0, sizeof *info);
  std::snprintf(
      info->internal, 64, "%d.%llx.%u", getpid(),
      static_cast<unsigned long long>(std::chrono::system_clock::now().time_since_epoch().count()),
      created++);
  return HCCL_SUCCESS;
}

SIMNPU_API HcclResult HcclCommInitRootInfo(uint32_t num_ranks, const HcclRootInfo* info,
                                           uint32_t rank, HcclComm* comm) {
  return create(info->internal, rank, num_ranks, comm);
}

SIMNPU_API HcclResult HcclCommInitRootInfoConfig(uint32_t num_ranks, const HcclRootInfo* info,
                                                 uint32_t rank, const HcclCommConfig*,
                                                 HcclComm* comm) {
  return create(info->internal, rank, num_ranks, comm);
}

// A rank outside the new group passes no ids or the id 0xFFFFFFFF, and gets no communicator.
SIMNPU_API HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t num_ranks, uint32_t* ids,
                                              uint64_t id, uint32_t rank, HcclCommConfig*,
                                              HcclComm* comm) {
  *comm = nullptr;
  if (!ids || id == UINT32_MAX) return HCCL_SUCCESS;
  return create(handle_of(*parent)->name + "/" + std::to_string(id), rank, num_ranks, comm);
}

SIMNPU_API HcclResult HcclCommDestroy(HcclComm comm) {
  delete &handle_of(comm);
  return HCCL_SUCCESS;
}

SIMNPU_API HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", handle_of(comm)->name.c_str());
  return HCCL_SUCCESS;
}

// Reports broken links on a device. Here a failure is one of the stream, and is reported by it.
SIMNPU_API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

SIMNPU_API HcclResult HcclGetRankSize(HcclComm comm, uint32_t* num_ranks) {
  *num_ranks = handle_of(comm)->num_ranks;
  return HCCL_SUCCESS;
}

SIMNPU_API HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = handle_of(comm)->rank;
  return HCCL_SUCCESS;
}

SIMNPU_API const char* HcclGetErrorString(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS:
      return "no error";
    case HCCL_E_PARA:
      return "parameter error";
    case HCCL_E_PTR:
      return "empty pointer";
    case HCCL_E_NOT_SUPPORT:
      return "not support feature";
    case HCCL_E_TIMEOUT:
      return "timeout";
    case HCCL_E_RUNTIME:
      return "call runtime api fail";
    case HCCL_E_REMOTE:
      return "error cqe";
    default:
      return "internal error";
  }
}

SIMNPU_API HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer,
                               HcclComm comm, aclrtStream stream) {
  return pass_or_queue({HCCL_SEND, buffer, count, type, peer}, comm, stream);
}

SIMNPU_API HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer,
                               HcclComm comm, aclrtStream stream) {
  return pass_or_queue({HCCL_RECV, buffer, count, type, peer}, comm, stream);
}

SIMNPU_API HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t num_items, HcclComm comm,
                                        aclrtStream stream) {
  return pass({items, items + num_items}, comm, stream);
}

SIMNPU_API HcclResult HcclGroupStart() {
  ++group_depth;
  return HCCL_SUCCESS;
}

SIMNPU_API HcclResult HcclGroupEnd() {
  if (--group_depth > 0) return HCCL_SUCCESS;
  std::vector<Queued> waiting;
  waiting.swap(queued);
  while (!waiting.empty()) {
    // By communicator and stream; torch_npu never has two in one group, but nothing forbids it.
    const Queued first = waiting.front();
    std::vector<HcclSendRecvItem> items;
    std::vector<Queued> others;
    for (const Queued& entry : waiting) {
      if (entry.comm == first.comm && entry.stream == first.stream) {
        items.push_back(entry.item);
      } else {
        others.push_back(entry);
      }
    }
    if (const HcclResult code = pass(items, first.comm, first.stream)) return code;
    waiting.swap(others);
  }
  return HCCL_SUCCESS;
}
