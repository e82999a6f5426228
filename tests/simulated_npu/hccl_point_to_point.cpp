// Sends and receives between two ranks. Both first compare how many messages pass each way, then
// type and count of each, then the data moves.
#include <algorithm>
#include <utility>

#include "hccl_communicator.hpp"

namespace simnpu::hccl {
namespace {

// The order in which both sides list their messages: for each peer the sends of the lower rank,
// then those of the higher one, each in the order of the calls.
std::vector<HcclSendRecvItem> in_common_order(std::vector<HcclSendRecvItem> items,
                                              std::uint32_t rank) {
  const auto key = [rank](const HcclSendRecvItem& item) {
    const bool from_lower = (item.sendRecvType == HCCL_SEND) == (rank < item.remoteRank);
    return std::pair(item.remoteRank, !from_lower);
  };
  std::stable_sort(items.begin(), items.end(),
                   [&key](const auto& a, const auto& b) { return key(a) < key(b); });
  return items;
}

}  // namespace

HcclResult Communicator::agree_on_batches(const std::vector<HcclSendRecvItem>& items) {
  std::map<std::uint32_t, Header> batches;
  for (const HcclSendRecvItem& item : items) {
    const auto found =
        batches.try_emplace(item.remoteRank, header_of({HCCL_CMD_BATCH_SEND_RECV}, 0));
    Header& batch = found.first->second;
    ++(item.sendRecvType == HCCL_SEND ? batch.count : batch.num_receives);
  }
  std::vector<std::uint32_t> peers;
  std::vector<Header> own;
  std::vector<Header> theirs;
  for (const auto& [peer, batch] : batches) {
    peers.push_back(peer);
    own.push_back(batch);
  }
  if (const HcclResult code = trade(peers, own, theirs, own.front())) return code;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    Header expected = own[i];
    std::swap(expected.count, expected.num_receives);
    if (!expected.agrees_with(theirs[i])) return disagree(peers[i], own[i], theirs[i]);
  }
  return HCCL_SUCCESS;
}

HcclResult Communicator::agree_on_items(const std::vector<HcclSendRecvItem>& items) {
  std::vector<std::uint32_t> peers;
  std::vector<Header> own;
  std::vector<Header> theirs;
  for (const HcclSendRecvItem& item : items) {
    peers.push_back(item.remoteRank);
    own.push_back(header_of({HCCL_CMD_SEND, item.dataType}, item.count));
  }
  if (const HcclResult code = trade(peers, own, theirs, own.front())) return code;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (!own[i].agrees_with(theirs[i])) return disagree(peers[i], own[i], theirs[i]);
  }
  return HCCL_SUCCESS;
}

HcclResult Communicator::pass(const std::vector<HcclSendRecvItem>& unordered) {
  if (unordered.empty()) return HCCL_SUCCESS;
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) return give_up(failure_, failure_text_);
  ++num_calls_;
  const auto items = in_common_order(unordered, rank);
  if (const HcclResult code = agree_on_batches(items)) return code;
  if (const HcclResult code = agree_on_items(items)) return code;
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  for (const HcclSendRecvItem& item : items) {
    auto& pieces = item.sendRecvType == HCCL_SEND ? sends : receives;
    pieces.push_back(piece(item.remoteRank, item.buf, item.count * element_size(item.dataType)));
  }
  return move(sends, receives, header_of({HCCL_CMD_SEND, items[0].dataType}, items[0].count));
}

}  // namespace simnpu::hccl
