// One call of FlashAttentionScore or of its gradient, whichever of their versions it came through.
#pragma once

#include <string>

#include "attention_layout.hpp"
#include "entry.hpp"

namespace simnpu::op {

struct TrainingCall {
  Tensor query, key, value;
  Tensor pse, drop_mask, mask;          // undefined when not given
  IntArray query_lengths, key_lengths;  // cumulative, TND only
  double scale = 1.0, keep_prob = 1.0;
  int64_t before = 0, after = 0;  // pre_tockens, next_tockens
  int64_t heads = 1;
  std::string layout;
  int64_t inner_precise = 0, sparse_mode = 0;
  // "same_as_input": max and sum of a TND call are TND in memory as well.
  std::string softmax_layout;

  bool packed() const { return is_packed(layout); }
  bool has_mask() const { return mask.defined() && mask.dim() > 0; }

  int64_t batch() const;
  int64_t head_dim() const;
  int64_t kv_heads() const;
  std::vector<Range> query_rows() const;
  std::vector<Range> key_rows() const;
  int64_t longest_query() const;
  int64_t longest_key() const;
};

// Keys that a sparse mode computes: key j of query i when i - before <= j <= i + after.
struct Window {
  int64_t before;
  int64_t after;
};

// The window of a padded call with a mask (CN PretokenAndNexttokenAdjustment, SparseBandModeCheck).
Window padded_window(const TrainingCall& call);

// Throws Refused for each argument that CANN turns down.
void check_training_call(const TrainingCall& call);
void check_training_mask(const TrainingCall& call);

}  // namespace simnpu::op
