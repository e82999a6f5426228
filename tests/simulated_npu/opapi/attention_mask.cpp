#include "attention_mask.hpp"

namespace simnpu::op {
namespace {

// j - i for every query and key.
at::Tensor key_minus_query(int64_t rows, int64_t keys) {
  return at::arange(keys, at::kLong).unsqueeze(0) - at::arange(rows, at::kLong).unsqueeze(1);
}

}  // namespace

at::Tensor band(int64_t rows, int64_t keys, int64_t before, int64_t after) {
  const at::Tensor distance = key_minus_query(rows, keys);
  return at::logical_and(distance >= -before, distance <= after);
}

at::Tensor written_mask(const at::Tensor& mask, int64_t batch, int64_t rows, int64_t keys,
                        bool per_head) {
  at::Tensor part = mask;
  if (part.dim() > 2) part = part.select(0, part.size(0) == 1 ? 0 : batch);
  if (part.dim() == 3 && !per_head) part = part.slice(0, 0, 1);
  if (part.dim() == 2) part = part.unsqueeze(0);
  return part.slice(1, 0, rows).slice(2, 0, keys).to(at::kBool);
}

at::Tensor tile_above(const at::Tensor& tile, int64_t rows, int64_t keys, int64_t after) {
  const at::Tensor flat = tile.flatten().to(at::kBool);
  const at::Tensor beyond = key_minus_query(rows, keys) - after;
  const at::Tensor row = (-beyond).clamp(0, kTileSize - 1);
  const at::Tensor column = beyond.clamp(0, kTileSize - 1);
  return flat.index({row * kTileSize + column}).unsqueeze(0);
}

at::Tensor tile_below(const at::Tensor& tile, int64_t rows, int64_t keys, int64_t before) {
  return at::logical_not(tile_above(tile, rows, keys, -before - 1));
}

}  // namespace simnpu::op
