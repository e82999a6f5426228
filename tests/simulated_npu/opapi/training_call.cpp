#include "training_call.hpp"

#include <algorithm>

#include "attention_mask.hpp"

namespace simnpu::op {
namespace {

int64_t longest(const std::vector<Range>& ranges) {
  int64_t length = 0;
  for (const Range& range : ranges) length = std::max(length, range.length());
  return length;
}

}  // namespace

int64_t TrainingCall::batch() const {
  return packed() ? static_cast<int64_t>(query_lengths.size()) : query.size(batch_axis(layout));
}

int64_t TrainingCall::head_dim() const {
  return head_axis(layout) < 0 ? query.size(-1) / heads : query.size(-1);
}

int64_t TrainingCall::kv_heads() const {
  const int axis = head_axis(layout);
  // BSH and SBH: as many heads of query's size as fit into key.
  return axis < 0 ? key.size(-1) / std::max<int64_t>(1, head_dim()) : key.size(axis);
}

std::vector<Range> TrainingCall::query_rows() const {
  return packed() ? packed_rows(query_lengths)
                  : padded_rows({}, batch(), query.size(row_axis(layout)));
}

std::vector<Range> TrainingCall::key_rows() const {
  return packed() ? packed_rows(key_lengths) : padded_rows({}, batch(), key.size(row_axis(layout)));
}

int64_t TrainingCall::longest_query() const {
  return longest(query_rows());
}

int64_t TrainingCall::longest_key() const {
  return longest(key_rows());
}

Window padded_window(const TrainingCall& call) {
  const int64_t rows = call.longest_query();
  const int64_t keys = call.longest_key();
  switch (call.sparse_mode) {
    case 0:
      return {call.before, call.after};
    case 2:
      return {rows, 0};
    case 3:
      return {rows, keys - rows};
    case 4:
      return {call.before + rows - keys, call.after + keys - rows};
    default:
      return {kMaxTokens, kMaxTokens};
  }
}

}  // namespace simnpu::op
