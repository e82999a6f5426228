// Where the part of each rank lies in a buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hccl_launch.hpp"

namespace simnpu::hccl {

using Counts = std::vector<std::uint64_t>;

// In elements, one entry for each rank.
struct Layout {
  Counts counts;
  Counts offsets;

  std::uint64_t extent() const;
  std::vector<Region> regions(const void* buffer, std::size_t element_size) const;
};

// Parts that follow one another.
Layout dense(Counts counts);

// The arrays that HCCL takes as const void*: num_ranks entries of 64 bits.
Counts listed(const void* entries, std::uint32_t num_ranks);

// HCCL declares the buffers it writes as const in places.
Region region(const void* buffer, std::size_t bytes);

std::vector<Outgoing> parts_of(const char* data, const Layout& layout, std::size_t element_size);
std::vector<Outgoing> same_for_all(const char* data, std::uint64_t count, std::uint32_t num_ranks);

std::vector<Incoming> expect(const Counts& counts);
// Only the root's data follows; the other ranks' count is compared alone.
std::vector<Incoming> expect_from(std::uint32_t root, std::uint64_t count, std::uint32_t num_ranks);

void store(const std::vector<Incoming>& incoming, const void* buffer, const Layout& layout,
           std::size_t element_size);

// Reduces in the order of the ranks, so that every rank gets the same bits.
void store_reduced(std::vector<Incoming>& incoming, const void* buffer, const Call& call);

}  // namespace simnpu::hccl
