#include "hccl_communicator.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "runtime.hpp"

namespace simnpu::hccl {
namespace {

int seconds(const char* variable, int fallback) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : fallback;
}

const char* name_of(std::uint32_t operation) {
  switch (operation) {
    case HCCL_CMD_BROADCAST:
      return "broadcast";
    case HCCL_CMD_ALLREDUCE:
      return "all_reduce";
    case HCCL_CMD_REDUCE:
      return "reduce";
    case HCCL_CMD_ALLGATHER:
      return "all_gather";
    case HCCL_CMD_ALLGATHER_V:
      return "all_gather_v";
    case HCCL_CMD_REDUCE_SCATTER:
      return "reduce_scatter";
    case HCCL_CMD_REDUCE_SCATTER_V:
      return "reduce_scatter_v";
    case HCCL_CMD_ALLTOALL:
      return "all_to_all";
    case HCCL_CMD_ALLTOALLV:
      return "all_to_all_v";
    case HCCL_CMD_SCATTER:
      return "scatter";
    case HCCL_CMD_BARRIER:
      return "barrier";
    case HCCL_CMD_SEND:
      return "send/recv";
    case HCCL_CMD_BATCH_SEND_RECV:
      return "point to point";
    default:
      return "unknown";
  }
}

// A process that has ended and waits for its parent counts as ended. The sockets of a dying
// process close a moment before that shows.
bool has_ended(pid_t process) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    std::ifstream status("/proc/" + std::to_string(process) + "/stat");
    std::string line;
    if (!std::getline(status, line)) return true;
    const char state = line[std::min(line.rfind(')') + 2, line.size() - 1)];
    if (state == 'Z' || state == 'X') return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace

Clock::time_point execution_deadline() {
  const int limit = seconds("HCCL_EXEC_TIMEOUT", 1836);
  return Clock::now() + (limit ? std::chrono::hours(0) : std::chrono::hours(24 * 365)) +
         std::chrono::seconds(limit);
}

Clock::time_point connection_deadline() {
  return Clock::now() + std::chrono::seconds(seconds("HCCL_CONNECT_TIMEOUT", 120));
}

bool Communicator::Header::agrees_with(const Header& other) const {
  return operation == other.operation && type == other.type && reduction == other.reduction &&
         root == other.root && count == other.count && num_receives == other.num_receives;
}

std::string Communicator::Header::text() const {
  const std::string call =
      std::string(name_of(operation)) + " (call " + std::to_string(number) + ", ";
  if (operation == HCCL_CMD_BATCH_SEND_RECV) {
    return call + std::to_string(count) + " sends, " + std::to_string(num_receives) + " receives)";
  }
  return call + "count " + std::to_string(count) + ", " +
         hccl::name_of(static_cast<HcclDataType>(type)) + ", reduction " +
         hccl::name_of(static_cast<HcclReduceOp>(reduction)) + ", root " + std::to_string(root) +
         ")";
}

Communicator::Communicator(const std::string& name, std::uint32_t rank, std::uint32_t num_ranks)
    : name(name),
      rank(rank),
      num_ranks(num_ranks),
      wire_(name, rank, num_ranks, connection_deadline()) {}

Communicator::Header Communicator::header_of(const Call& call, std::uint64_t count) const {
  return {static_cast<std::uint32_t>(call.operation),
          static_cast<std::uint32_t>(call.type),
          static_cast<std::uint32_t>(call.reduction),
          call.root,
          num_calls_,
          count,
          0};
}

HcclResult Communicator::give_up(HcclResult code, const std::string& text) {
  wire_.close_all();
  failure_ = code;
  failure_text_ = text;
  set_error(text);
  return code;
}

// The text of a device: EI0005 (CANN HCCL user guide, parameter consistency check).
HcclResult Communicator::disagree(std::uint32_t peer, const Header& own, const Header& theirs) {
  return give_up(HCCL_E_PARA,
                 "EI0005: The arguments for collective communication are inconsistent between "
                 "ranks: communicator " +
                     name + ", local rank " + std::to_string(rank) + " " + own.text() +
                     ", remote rank " + std::to_string(peer) + " " + theirs.text());
}

// A device would only notice the silence, after HCCL_EXEC_TIMEOUT, with the text EI0002 (CANN error
// code reference); the simulation knows at once when a peer's process has ended.
HcclResult Communicator::move(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                              const Header& doing) {
  const auto trouble = wire_.transfer(sends, receives, execution_deadline());
  if (!trouble) return HCCL_SUCCESS;
  const auto seen = last_seen_.find(trouble->peer);
  const std::string here =
      "rank " + std::to_string(rank) + " in " + doing.text() + " of communicator " + name;
  const std::string there = "rank " + std::to_string(trouble->peer) + " (process " +
                            std::to_string(wire_.process_of(trouble->peer)) + ", last seen in " +
                            (seen == last_seen_.end() ? "nothing" : seen->second) + ")";
  if (trouble->kind == Trouble::kTimeout) {
    return give_up(HCCL_E_TIMEOUT,
                   "EI0002: The wait execution of the Notify register times out. Reason: " + here +
                       " waited " + std::to_string(seconds("HCCL_EXEC_TIMEOUT", 1836)) +
                       " s (HCCL_EXEC_TIMEOUT) for " + there);
  }
  const bool ended = has_ended(wire_.process_of(trouble->peer));
  return give_up(HCCL_E_REMOTE,
                 "simnpu: " + here + " lost " + there +
                     (ended ? ": its process has ended"
                            : ": it left the communicator, perhaps after a failure of its own"));
}

HcclResult Communicator::trade(const std::vector<std::uint32_t>& peers,
                               const std::vector<Header>& own, std::vector<Header>& theirs,
                               const Header& doing) {
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  theirs.resize(own.size());
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (peers[i] == rank) {
      theirs[i] = own[i];
      continue;
    }
    sends.push_back(piece(peers[i], &own[i], sizeof own[i]));
    receives.push_back(piece(peers[i], &theirs[i], sizeof theirs[i]));
  }
  if (const HcclResult code = move(sends, receives, doing)) return code;
  for (std::size_t i = 0; i < own.size(); ++i) last_seen_[peers[i]] = theirs[i].text();
  return HCCL_SUCCESS;
}

HcclResult Communicator::exchange(const Call& call, const std::vector<Outgoing>& outgoing,
                                  std::vector<Incoming>& incoming) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) return give_up(failure_, failure_text_);
  ++num_calls_;
  std::vector<std::uint32_t> peers(num_ranks);
  std::vector<Header> own(num_ranks);
  std::vector<Header> theirs;
  for (std::uint32_t peer = 0; peer < num_ranks; ++peer) {
    peers[peer] = peer;
    own[peer] = header_of(call, outgoing[peer].count);
  }
  if (const HcclResult code = trade(peers, own, theirs, own[rank])) return code;
  for (std::uint32_t peer = 0; peer < num_ranks; ++peer) {
    const Header expected = header_of(call, incoming[peer].count);
    if (!expected.agrees_with(theirs[peer])) return disagree(peer, expected, theirs[peer]);
  }
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  const std::size_t size = element_size(call.type);
  for (std::uint32_t peer = 0; peer < num_ranks; ++peer) {
    Incoming& from = incoming[peer];
    const Outgoing& to = outgoing[peer];
    from.data.resize(from.follows ? from.count * size : 0);
    if (peer == rank) {
      if (from.follows && !from.data.empty()) {
        std::memcpy(from.data.data(), to.data, from.data.size());
      }
      continue;
    }
    if (to.data) sends.push_back(piece(peer, to.data, to.count * size));
    receives.push_back(piece(peer, from.data.data(), from.data.size()));
  }
  return move(sends, receives, own[rank]);
}

}  // namespace simnpu::hccl
