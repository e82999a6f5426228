// A communicator: what the ranks of a group tell each other before they move data.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "hccl_types.hpp"
#include "hccl_wire.hpp"

namespace simnpu::hccl {

// What all ranks have to agree on.
struct Call {
  HcclCMDType operation;
  HcclDataType type = HCCL_DATA_TYPE_INT8;
  HcclReduceOp reduction = HCCL_REDUCE_RESERVED;
  std::uint32_t root = 0;
};

// For one peer: the count this rank states, and the data of that many elements, or null when only
// the count is compared.
struct Outgoing {
  const char* data;
  std::uint64_t count;
};

// From one peer: the count this rank expects, and whether that many elements follow.
struct Incoming {
  std::uint64_t count;
  bool follows;
  std::vector<char> data;
};

class Communicator {
 public:
  // Meets all other ranks under this name; throws std::runtime_error when they do not come.
  Communicator(const std::string& name, std::uint32_t rank, std::uint32_t num_ranks);

  // A collective: one Outgoing and one Incoming for each rank, this one included.
  HcclResult exchange(const Call& call, const std::vector<Outgoing>& outgoing,
                      std::vector<Incoming>& incoming);

  // Sends and receives that happen together; none has this rank at its other end. A send meets its
  // receive: neither ends before the other has begun.
  HcclResult pass(const std::vector<HcclSendRecvItem>& items);

  // The first failure, after which nothing works any more: the ranks' messages no longer match.
  HcclResult failure() const { return failure_; }

  const std::string name;
  const std::uint32_t rank;
  const std::uint32_t num_ranks;

 private:
  struct Header {
    std::uint32_t operation;
    std::uint32_t type;
    std::uint32_t reduction;
    std::uint32_t root;
    std::uint64_t number;  // of this rank's calls on this communicator
    std::uint64_t count;
    std::uint64_t num_receives;  // of a point to point batch, whose count is its sends

    // Whether both state the same, whatever the number of the call.
    bool agrees_with(const Header& other) const;
    std::string text() const;
  };

  Header header_of(const Call& call, std::uint64_t count) const;
  HcclResult agree_on_batches(const std::vector<HcclSendRecvItem>& items);
  HcclResult agree_on_items(const std::vector<HcclSendRecvItem>& items);
  HcclResult trade(const std::vector<std::uint32_t>& peers, const std::vector<Header>& own,
                   std::vector<Header>& theirs, const Header& doing);
  HcclResult move(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                  const Header& doing);
  HcclResult disagree(std::uint32_t peer, const Header& own, const Header& theirs);
  HcclResult give_up(HcclResult code, const std::string& text);

  std::mutex mutex_;
  Wire wire_;
  std::uint64_t num_calls_ = 0;
  std::map<std::uint32_t, std::string> last_seen_;  // each peer's latest call
  HcclResult failure_ = HCCL_SUCCESS;
  std::string failure_text_;
};

// Seconds from HCCL_EXEC_TIMEOUT (0: for ever) and HCCL_CONNECT_TIMEOUT, CANN's own variables.
Clock::time_point execution_deadline();
Clock::time_point connection_deadline();

}  // namespace simnpu::hccl
