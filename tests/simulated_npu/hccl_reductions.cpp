// libhccl.so: all_reduce, reduce, reduce_scatter and the barrier.
#include "hccl_layout.hpp"
#include "third_party/hccl/inc/hccl/hccl.h"

using namespace simnpu::hccl;

SIMNPU_API HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type,
                                    HcclReduceOp reduction, HcclComm comm, aclrtStream stream) {
  if (const HcclResult code = check_reduction(type, reduction)) return code;
  const std::size_t bytes = count * element_size(type);
  const Call call{HCCL_CMD_ALLREDUCE, type, reduction};
  return launch(comm, stream, "HcclAllReduce", region(send, bytes), {region(receive, bytes)},
                [=](Communicator& ranks, const char* data) {
                  auto incoming = expect(Counts(ranks.num_ranks, count));
                  const auto outgoing = same_for_all(data, count, ranks.num_ranks);
                  const HcclResult code = ranks.exchange(call, outgoing, incoming);
                  if (code == HCCL_SUCCESS) store_reduced(incoming, receive, call);
                  return code;
                });
}

SIMNPU_API HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type,
                                 HcclReduceOp reduction, uint32_t root, HcclComm comm,
                                 aclrtStream stream) {
  const Communicator& group = *handle_of(comm);
  if (const HcclResult code = check_reduction(type, reduction)) return code;
  if (const HcclResult code = check_rank(group, root)) return code;
  const std::size_t bytes = count * element_size(type);
  const bool is_root = group.rank == root;
  std::vector<Region> receives;
  if (is_root) receives.push_back(region(receive, bytes));
  const Call call{HCCL_CMD_REDUCE, type, reduction, root};
  return launch(comm, stream, "HcclReduce", region(send, bytes), receives,
                [=](Communicator& ranks, const char* data) {
                  auto outgoing = same_for_all(nullptr, count, ranks.num_ranks);
                  outgoing[root].data = data;
                  std::vector<Incoming> incoming(ranks.num_ranks, Incoming{count, is_root, {}});
                  const HcclResult code = ranks.exchange(call, outgoing, incoming);
                  if (code == HCCL_SUCCESS && is_root) store_reduced(incoming, receive, call);
                  return code;
                });
}

namespace {

HcclResult reduce_scatter(const void* send, const void* receive, const Layout& layout,
                          uint64_t count, const Call& call, const char* name, HcclComm comm,
                          aclrtStream stream) {
  if (const HcclResult code = check_reduction(call.type, call.reduction)) return code;
  const std::size_t size = element_size(call.type);
  return launch(comm, stream, name, region(send, layout.extent() * size),
                {region(receive, count * size)}, [=](Communicator& ranks, const char* data) {
                  auto incoming = expect(Counts(ranks.num_ranks, count));
                  const HcclResult code =
                      ranks.exchange(call, parts_of(data, layout, size), incoming);
                  if (code == HCCL_SUCCESS) store_reduced(incoming, receive, call);
                  return code;
                });
}

}  // namespace

SIMNPU_API HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count,
                                        HcclDataType type, HcclReduceOp reduction, HcclComm comm,
                                        aclrtStream stream) {
  const Layout layout = dense(Counts(handle_of(comm)->num_ranks, count));
  return reduce_scatter(send, receive, layout, count, {HCCL_CMD_REDUCE_SCATTER, type, reduction},
                        "HcclReduceScatter", comm, stream);
}

SIMNPU_API HcclResult HcclReduceScatterV(void* send, const void* counts, const void* offsets,
                                         void* receive, uint64_t count, HcclDataType type,
                                         HcclReduceOp reduction, HcclComm comm,
                                         aclrtStream stream) {
  const uint32_t num_ranks = handle_of(comm)->num_ranks;
  const Layout layout{listed(counts, num_ranks), listed(offsets, num_ranks)};
  return reduce_scatter(send, receive, layout, count, {HCCL_CMD_REDUCE_SCATTER_V, type, reduction},
                        "HcclReduceScatterV", comm, stream);
}

SIMNPU_API HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, "HcclBarrier", {}, {}, [](Communicator& ranks, const char*) {
    auto incoming = expect(Counts(ranks.num_ranks, 0));
    return ranks.exchange({HCCL_CMD_BARRIER}, same_for_all(nullptr, 0, ranks.num_ranks), incoming);
  });
}
