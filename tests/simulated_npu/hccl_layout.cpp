#include "hccl_layout.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace simnpu::hccl {
namespace {

char* bytes_at(const void* pointer, std::uint64_t offset) {
  return const_cast<char*>(static_cast<const char*>(pointer)) + offset;
}

}  // namespace

std::uint64_t Layout::extent() const {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i]) end = std::max(end, offsets[i] + counts[i]);
  }
  return end;
}

std::vector<Region> Layout::regions(const void* buffer, std::size_t element_size) const {
  std::vector<Region> all;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    all.push_back({bytes_at(buffer, offsets[i] * element_size), counts[i] * element_size});
  }
  return all;
}

Layout dense(Counts counts) {
  Counts offsets;
  std::uint64_t offset = 0;
  for (const std::uint64_t count : counts) {
    offsets.push_back(offset);
    offset += count;
  }
  return {std::move(counts), std::move(offsets)};
}

Counts listed(const void* entries, std::uint32_t num_ranks) {
  const auto* first = static_cast<const std::uint64_t*>(entries);
  return {first, first + num_ranks};
}

Region region(const void* buffer, std::size_t bytes) {
  return {bytes_at(buffer, 0), bytes};
}

std::vector<Outgoing> parts_of(const char* data, const Layout& layout, std::size_t element_size) {
  std::vector<Outgoing> parts;
  for (std::size_t i = 0; i < layout.counts.size(); ++i) {
    parts.push_back({data + layout.offsets[i] * element_size, layout.counts[i]});
  }
  return parts;
}

std::vector<Outgoing> same_for_all(const char* data, std::uint64_t count, std::uint32_t num_ranks) {
  return std::vector<Outgoing>(num_ranks, Outgoing{data, count});
}

std::vector<Incoming> expect(const Counts& counts) {
  std::vector<Incoming> incoming;
  for (const std::uint64_t count : counts) incoming.push_back({count, true, {}});
  return incoming;
}

std::vector<Incoming> expect_from(std::uint32_t root, std::uint64_t count,
                                  std::uint32_t num_ranks) {
  std::vector<Incoming> incoming(num_ranks, Incoming{count, false, {}});
  incoming[root].follows = true;
  return incoming;
}

void store(const std::vector<Incoming>& incoming, const void* buffer, const Layout& layout,
           std::size_t element_size) {
  for (std::size_t i = 0; i < incoming.size(); ++i) {
    const auto& data = incoming[i].data;
    if (data.empty()) continue;
    std::memcpy(bytes_at(buffer, layout.offsets[i] * element_size), data.data(), data.size());
  }
}

void store_reduced(std::vector<Incoming>& incoming, const void* buffer, const Call& call) {
  std::vector<char>& total = incoming[0].data;
  for (std::size_t i = 1; i < incoming.size(); ++i) {
    accumulate(total.data(), incoming[i].data.data(), incoming[i].count, call.type, call.reduction);
  }
  if (!total.empty()) std::memcpy(bytes_at(buffer, 0), total.data(), total.size());
}

}  // namespace simnpu::hccl
