// The connections between the ranks of one communicator: a Unix stream socket for each pair, with a
// name in Linux's abstract namespace. The kernel removes it with its process, so nothing has to be
// cleaned up after a crash, and a rank that dies closes its end, which its peers see at once.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace simnpu::hccl {

using Clock = std::chrono::steady_clock;

// Bytes to or from one peer.
struct Piece {
  std::uint32_t peer;
  char* data;
  std::size_t bytes;
};

// Data that is only read may be given as const.
Piece piece(std::uint32_t peer, const void* data, std::size_t bytes);

// Why a transfer stopped.
struct Trouble {
  enum Kind { kClosed, kTimeout } kind;
  std::uint32_t peer;
};

class Wire {
 public:
  // Connects this rank with all others; throws std::runtime_error naming the ranks that are missing
  // at the deadline or that count the ranks differently.
  Wire(const std::string& name, std::uint32_t rank, std::uint32_t num_ranks,
       Clock::time_point deadline);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Moves all pieces at once, so that two ranks that send to each other never wait in a circle;
  // pieces of one peer keep their order.
  std::optional<Trouble> transfer(const std::vector<Piece>& sends,
                                  const std::vector<Piece>& receives, Clock::time_point deadline);

  // Closes every connection: the peers' transfers with this rank end.
  void close_all();

  pid_t process_of(std::uint32_t peer) const { return peers_.at(peer).process; }

 private:
  struct Peer {
    int socket = -1;
    pid_t process = 0;
  };

  void connect_to(const std::string& name, std::uint32_t peer, Clock::time_point deadline);
  void accept_from(int listener, Clock::time_point deadline);
  std::string absent() const;

  std::uint32_t rank_;
  std::vector<Peer> peers_;
};

}  // namespace simnpu::hccl
