#include "hccl_wire.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <thread>

namespace simnpu::hccl {
namespace {

// What a rank says first on a new connection.
struct Greeting {
  std::uint32_t rank;
  std::uint32_t num_ranks;
};

struct Address {
  sockaddr_un name{};
  socklen_t length;
};

Address address_of(const std::string& communicator, std::uint32_t rank) {
  Address address;
  address.name.sun_family = AF_UNIX;
  // A leading zero byte puts the name into the abstract namespace (unix(7)).
  const std::string text = "simnpu/" + communicator + "/" + std::to_string(rank);
  if (text.size() + 1 > sizeof address.name.sun_path) {
    throw std::runtime_error("the communicator's name is too long: " + communicator);
  }
  std::memcpy(address.name.sun_path + 1, text.data(), text.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

sockaddr* generic(Address& address) {
  return reinterpret_cast<sockaddr*>(&address.name);
}

int new_socket() {
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) throw std::runtime_error(std::string("socket: ") + std::strerror(errno));
  return socket;
}

int listen_as(const std::string& communicator, std::uint32_t rank) {
  const int listener = new_socket();
  Address address = address_of(communicator, rank);
  if (bind(listener, generic(address), address.length) || listen(listener, SOMAXCONN)) {
    const std::string reason = std::strerror(errno);
    close(listener);
    throw std::runtime_error("rank " + std::to_string(rank) + " cannot listen: " + reason);
  }
  return listener;
}

// The process at the other end of a connection.
pid_t process_at(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length);
  return credentials.pid;
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<long long>(left.count(), 0, 1'000'000));
}

// The part of the pieces of one peer that has not been moved yet.
struct Queue {
  std::deque<Piece> pieces;

  void add(const Piece& piece) {
    if (piece.bytes) pieces.push_back(piece);
  }
  bool empty() const { return pieces.empty(); }
  void moved(std::size_t bytes) {
    pieces.front().data += bytes;
    pieces.front().bytes -= bytes;
    if (pieces.front().bytes == 0) pieces.pop_front();
  }
};

// Moves what the socket takes or holds at the moment; false when the connection has ended.
template <typename Call>
bool advance(Queue& queue, Call call) {
  while (!queue.empty()) {
    const ssize_t moved = call(queue.pieces.front());
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (moved <= 0) return false;
    queue.moved(static_cast<std::size_t>(moved));
  }
  return true;
}

bool send_some(int socket, Queue& queue) {
  return advance(queue, [socket](const Piece& piece) {
    return send(socket, piece.data, piece.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  });
}

bool receive_some(int socket, Queue& queue) {
  return advance(queue, [socket](const Piece& piece) {
    return recv(socket, piece.data, piece.bytes, MSG_DONTWAIT);
  });
}

}  // namespace

Piece piece(std::uint32_t peer, const void* data, std::size_t bytes) {
  return {peer, const_cast<char*>(static_cast<const char*>(data)), bytes};
}

Wire::Wire(const std::string& name, std::uint32_t rank, std::uint32_t num_ranks,
           Clock::time_point deadline)
    : rank_(rank), peers_(num_ranks) {
  if (num_ranks == 1) return;
  const int listener = listen_as(name, rank);
  try {
    // A connection succeeds as soon as the other side listens, so nobody waits in a circle.
    for (std::uint32_t peer = 0; peer < rank; ++peer) connect_to(name, peer, deadline);
    for (std::uint32_t peer = rank + 1; peer < num_ranks; ++peer) accept_from(listener, deadline);
  } catch (...) {
    close(listener);
    close_all();
    throw;
  }
  close(listener);
}

Wire::~Wire() {
  close_all();
}

void Wire::close_all() {
  for (Peer& peer : peers_) {
    if (peer.socket >= 0) close(peer.socket);
    peer.socket = -1;
  }
}

std::string Wire::absent() const {
  std::string ranks;
  for (std::uint32_t peer = 0; peer < peers_.size(); ++peer) {
    if (peer == rank_ || peers_[peer].socket >= 0) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
  }
  return ranks;
}

void Wire::connect_to(const std::string& name, std::uint32_t peer, Clock::time_point deadline) {
  const int socket = new_socket();
  Address address = address_of(name, peer);
  while (connect(socket, generic(address), address.length)) {
    if (Clock::now() >= deadline) {
      close(socket);
      throw std::runtime_error("no connection with rank(s) " + absent());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  peers_[peer] = {socket, process_at(socket)};
  const Greeting greeting{rank_, static_cast<std::uint32_t>(peers_.size())};
  if (send(socket, &greeting, sizeof greeting, MSG_NOSIGNAL) != sizeof greeting) {
    throw std::runtime_error("rank " + std::to_string(peer) + " closed the connection");
  }
}

void Wire::accept_from(int listener, Clock::time_point deadline) {
  pollfd waiting{listener, POLLIN, 0};
  while (poll(&waiting, 1, milliseconds_until(deadline)) <= 0) {
    if (Clock::now() >= deadline)
      throw std::runtime_error("no connection with rank(s) " + absent());
  }
  const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  Greeting greeting{};
  if (socket < 0 || recv(socket, &greeting, sizeof greeting, MSG_WAITALL) != sizeof greeting) {
    if (socket >= 0) close(socket);
    throw std::runtime_error("a rank closed the connection at once");
  }
  if (greeting.num_ranks != peers_.size() || greeting.rank >= peers_.size()) {
    close(socket);
    throw std::runtime_error("rank " + std::to_string(rank_) + " counts " +
                             std::to_string(peers_.size()) + " ranks, rank " +
                             std::to_string(greeting.rank) + " counts " +
                             std::to_string(greeting.num_ranks));
  }
  peers_[greeting.rank] = {socket, process_at(socket)};
}

std::optional<Trouble> Wire::transfer(const std::vector<Piece>& sends,
                                      const std::vector<Piece>& receives,
                                      Clock::time_point deadline) {
  std::vector<Queue> outgoing(peers_.size());
  std::vector<Queue> incoming(peers_.size());
  for (const Piece& piece : sends) outgoing.at(piece.peer).add(piece);
  for (const Piece& piece : receives) incoming.at(piece.peer).add(piece);
  while (true) {
    std::vector<pollfd> waiting;
    std::vector<std::uint32_t> waiting_for;
    for (std::uint32_t peer = 0; peer < peers_.size(); ++peer) {
      const int events =
          (incoming[peer].empty() ? 0 : POLLIN) | (outgoing[peer].empty() ? 0 : POLLOUT);
      if (!events) continue;
      if (peers_[peer].socket < 0) return Trouble{Trouble::kClosed, peer};
      waiting.push_back({peers_[peer].socket, static_cast<short>(events), 0});
      waiting_for.push_back(peer);
    }
    if (waiting.empty()) return std::nullopt;
    const int ready = poll(waiting.data(), waiting.size(), milliseconds_until(deadline));
    if (ready <= 0 && Clock::now() >= deadline) {
      return Trouble{Trouble::kTimeout, waiting_for.front()};
    }
    if (ready <= 0) continue;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      const std::uint32_t peer = waiting_for[i];
      if (!waiting[i].revents) continue;
      // Receives first: a peer that has ended may have sent all that this rank needs.
      const int socket = peers_[peer].socket;
      if (!receive_some(socket, incoming[peer]) || !send_some(socket, outgoing[peer])) {
        return Trouble{Trouble::kClosed, peer};
      }
    }
  }
}

}  // namespace simnpu::hccl
