// Which keys a fused attention kernel computes for each query, and which of those its mask hides.
//
// The two are not the same: keys that are not computed cannot take part whatever happens, a hidden
// score is the number -FLT_MAX, so a row of nothing but hidden scores is a softmax over equals
// (CN, the PFA and FA kernels).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace simnpu::op {

// Bool tensors that broadcast to [heads, rows, keys]; undefined: every key is computed, none is
// hidden.
struct Visibility {
  at::Tensor computed;
  at::Tensor hidden;
};

constexpr int64_t kTileSize = 2048;        // of the compressed mask
constexpr int64_t kMaxTokens = 214748647;  // CN SPARSE_MODE_INT_MAX, its missing digit included

// Key j of query i when i - before <= j <= i + after.
at::Tensor band(int64_t rows, int64_t keys, int64_t before, int64_t after);

// The mask that a user wrote out, True where it hides: rank 2, 3 or 4 with rows and keys last.
// Batch entry `batch` of it or the only one, cut to [rows, keys] from its top left; of its heads
// the first only, unless per_head.
at::Tensor written_mask(const at::Tensor& mask, int64_t batch, int64_t rows, int64_t keys,
                        bool per_head);

// The compressed [2048, 2048] mask of sparse modes 2, 3 and 4, laid along a diagonal: what it hides
// of the keys above j = i + after, and below j = i - before. Its content decides: with triu(ones,
// 1) these are exactly the keys outside the band, with anything else the answer is as wrong as on a
// device. (A device reads the tile for blocks that meet the diagonal only and skips the others;
// here it is read for every key, so that a wrong content shows at any size.)
at::Tensor tile_above(const at::Tensor& tile, int64_t rows, int64_t keys, int64_t after);
at::Tensor tile_below(const at::Tensor& tile, int64_t rows, int64_t keys, int64_t before);

}  // namespace simnpu::op
