// One call of FusedInferAttentionScore, whichever of its versions it came through.
#pragma once

#include <string>

#include "attention_layout.hpp"
#include "entry.hpp"

namespace simnpu::op {

struct InferCall {
  Tensor query, key, value;
  Tensor pse, mask;                     // undefined when not given
  IntArray query_lengths, key_lengths;  // empty when not given
  int64_t heads = 1, kv_heads = 0;
  double scale = 1.0;
  int64_t before = 0, after = 0;  // pre_tokens, next_tokens
  std::string layout;
  int64_t sparse_mode = 0, inner_precise = 0;
  bool wants_lse = false;
  Out out{{}, nullptr}, lse{{}, nullptr};

  std::string from() const { return input_layout(layout); }
  bool packed() const { return is_packed(from()); }
  bool has_mask() const { return mask.defined() && mask.numel() > 0; }  // an empty mask is no mask

  int64_t batch() const;
  int64_t num_queries() const { return query.size(row_axis(from())); }
  int64_t num_keys() const { return key.size(row_axis(from())); }
  int64_t head_dim() const { return dim_of(query, heads); }

  // One query row takes another kernel than several (CN IsUsingIFA): IncreFlashAttention.
  bool single_query() const { return !packed() && num_queries() == 1 && layout == from(); }

  // The head dim of query (with `heads`) or of key and value (with the key/value heads).
  int64_t dim_of(const Tensor& tensor, int64_t num_heads) const;
};

// Throws Refused for each argument that CANN turns down; fills in kv_heads = 0. What it lets pass
// is not all right: see infer_attention.cpp for calls that are accepted and wrong.
void check_infer_call(InferCall& call);

// The part of it about atten_mask, sparse_mode, pre_tokens and next_tokens.
void check_infer_mask(const InferCall& call);

}  // namespace simnpu::op
