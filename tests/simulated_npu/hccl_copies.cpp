// libhccl.so: the collectives that only move data.
#include <cstring>

#include "hccl_layout.hpp"
#include "third_party/hccl/inc/hccl/hccl.h"

using namespace simnpu::hccl;

SIMNPU_API HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root,
                                    HcclComm comm, aclrtStream stream) {
  const Communicator& group = *handle_of(comm);
  if (const HcclResult code = check_type(type)) return code;
  if (const HcclResult code = check_rank(group, root)) return code;
  const std::size_t size = element_size(type);
  const bool is_root = group.rank == root;
  const Region all = region(buffer, count * size);
  std::vector<Region> receives;
  if (!is_root) receives.push_back(all);
  const Call call{HCCL_CMD_BROADCAST, type, HCCL_REDUCE_RESERVED, root};
  return launch(comm, stream, "HcclBroadcast", is_root ? all : Region{}, receives,
                [=](Communicator& ranks, const char* data) {
                  const Layout whole{Counts(ranks.num_ranks, count), Counts(ranks.num_ranks, 0)};
                  const auto outgoing =
                      same_for_all(is_root ? data : nullptr, count, ranks.num_ranks);
                  auto incoming = expect_from(root, count, ranks.num_ranks);
                  const HcclResult code = ranks.exchange(call, outgoing, incoming);
                  if (code == HCCL_SUCCESS && !is_root) store(incoming, buffer, whole, size);
                  return code;
                });
}

SIMNPU_API HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type,
                                  uint32_t root, HcclComm comm, aclrtStream stream) {
  const Communicator& group = *handle_of(comm);
  if (const HcclResult code = check_type(type)) return code;
  if (const HcclResult code = check_rank(group, root)) return code;
  const std::size_t size = element_size(type);
  const bool is_root = group.rank == root;
  const Layout parts = dense(Counts(group.num_ranks, count));
  const Region all = is_root ? region(send, parts.extent() * size) : Region{};
  const Call call{HCCL_CMD_SCATTER, type, HCCL_REDUCE_RESERVED, root};
  return launch(comm, stream, "HcclScatter", all, {region(receive, count * size)},
                [=](Communicator& ranks, const char* data) {
                  const Layout whole{Counts(ranks.num_ranks, count), Counts(ranks.num_ranks, 0)};
                  const auto outgoing = is_root ? parts_of(data, parts, size)
                                                : same_for_all(nullptr, count, ranks.num_ranks);
                  auto incoming = expect_from(root, count, ranks.num_ranks);
                  const HcclResult code = ranks.exchange(call, outgoing, incoming);
                  if (code == HCCL_SUCCESS) store(incoming, receive, whole, size);
                  return code;
                });
}

namespace {

HcclResult all_gather(const void* send, uint64_t count, const void* receive, const Layout& layout,
                      const Call& call, const char* name, HcclComm comm, aclrtStream stream) {
  if (const HcclResult code = check_type(call.type)) return code;
  const std::size_t size = element_size(call.type);
  return launch(comm, stream, name, region(send, count * size), layout.regions(receive, size),
                [=](Communicator& ranks, const char* data) {
                  auto incoming = expect(layout.counts);
                  const auto outgoing = same_for_all(data, count, ranks.num_ranks);
                  const HcclResult code = ranks.exchange(call, outgoing, incoming);
                  if (code == HCCL_SUCCESS) store(incoming, receive, layout, size);
                  return code;
                });
}

// On some stacks an all-to-all among more than two ranks succeeded and returned zeros; a machine
// check has to find that, so it can be asked for here.
bool returns_zeros(const Communicator& ranks) {
  return ranks.num_ranks > 2 && simnpu::fault("alltoall_zeros");
}

HcclResult all_to_all(const void* send, const Layout& from, const void* receive, const Layout& to,
                      HcclDataType send_type, HcclDataType receive_type, HcclCMDType operation,
                      const char* name, HcclComm comm, aclrtStream stream) {
  if (const HcclResult code = check_type(send_type)) return code;
  if (send_type != receive_type) {
    return refuse(HCCL_E_PARA, std::string(name) + ": sends " + name_of(send_type) + ", receives " +
                                   name_of(receive_type));
  }
  const std::size_t size = element_size(send_type);
  const auto receives = to.regions(receive, size);
  return launch(comm, stream, name, region(send, from.extent() * size), receives,
                [=](Communicator& ranks, const char* data) {
                  auto incoming = expect(to.counts);
                  const HcclResult code =
                      ranks.exchange({operation, send_type}, parts_of(data, from, size), incoming);
                  if (code != HCCL_SUCCESS) return code;
                  store(incoming, receive, to, size);
                  if (!returns_zeros(ranks)) return code;
                  for (const Region& part : receives) std::memset(part.data, 0, part.bytes);
                  return code;
                });
}

}  // namespace

SIMNPU_API HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type,
                                    HcclComm comm, aclrtStream stream) {
  const Layout layout = dense(Counts(handle_of(comm)->num_ranks, count));
  return all_gather(send, count, receive, layout, {HCCL_CMD_ALLGATHER, type}, "HcclAllGather", comm,
                    stream);
}

SIMNPU_API HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts,
                                     const void* offsets, HcclDataType type, HcclComm comm,
                                     aclrtStream stream) {
  const uint32_t num_ranks = handle_of(comm)->num_ranks;
  const Layout layout{listed(counts, num_ranks), listed(offsets, num_ranks)};
  return all_gather(send, count, receive, layout, {HCCL_CMD_ALLGATHER_V, type}, "HcclAllGatherV",
                    comm, stream);
}

SIMNPU_API HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type,
                                   const void* receive, uint64_t receive_count,
                                   HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  const uint32_t num_ranks = handle_of(comm)->num_ranks;
  return all_to_all(send, dense(Counts(num_ranks, send_count)), receive,
                    dense(Counts(num_ranks, receive_count)), send_type, receive_type,
                    HCCL_CMD_ALLTOALL, "HcclAlltoAll", comm, stream);
}

SIMNPU_API HcclResult HcclAlltoAllV(const void* send, const void* send_counts,
                                    const void* send_offsets, HcclDataType send_type,
                                    const void* receive, const void* receive_counts,
                                    const void* receive_offsets, HcclDataType receive_type,
                                    HcclComm comm, aclrtStream stream) {
  const uint32_t num_ranks = handle_of(comm)->num_ranks;
  const Layout from{listed(send_counts, num_ranks), listed(send_offsets, num_ranks)};
  const Layout to{listed(receive_counts, num_ranks), listed(receive_offsets, num_ranks)};
  return all_to_all(send, from, receive, to, send_type, receive_type, HCCL_CMD_ALLTOALLV,
                    "HcclAlltoAllV", comm, stream);
}
