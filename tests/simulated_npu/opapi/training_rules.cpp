// The argument rules of FlashAttentionScore: those of the aclnn function (161002) and of tiling
// (561103), with the texts of CN (refusal.hpp). op-plugin has checked layout, ranks, keep_prob and
// the range of sparse_mode before.
#include <algorithm>

#include "refusal.hpp"
#include "training_call.hpp"

namespace simnpu::op {
namespace {

constexpr int64_t kMaxDim = 768;
// The vendor documents these; CN does not check them.
constexpr int64_t kMaxHeads = 256;
constexpr int64_t kMaxRows = 1048576;
constexpr int64_t kMaxPackedBatch = 2048;

template <class... Parts>
void require(bool kept, const Parts&... parts) {
  require_tiling(kept, "FlashAttentionScore", kInnerNull, parts...);
}

void check_types(const TrainingCall& call) {
  const at::ScalarType type = call.query.scalar_type();
  require_parameter(type == call.key.scalar_type() && type == call.value.scalar_type(),
                    "The data type of query[", data_type_name(type), "], key[",
                    data_type_name(call.key.scalar_type()), "], value[",
                    data_type_name(call.value.scalar_type()), "] are not equal.");
  require_parameter(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                    "not support input dtype: ", data_type_name(type), " for now");
  require_parameter(!call.pse.defined() || call.pse.scalar_type() == type, "The data type ",
                    call.pse.defined() ? data_type_name(call.pse.scalar_type()) : "",
                    " of pse is not equal to the data type ", data_type_name(type),
                    " of query, key and value.");
}

void check_layout(const TrainingCall& call) {
  const auto rank = static_cast<int64_t>(call.layout.size());
  require(call.query.dim() == rank && call.key.dim() == rank && call.value.dim() == rank,
          "Invalid layout[", call.layout, "].");
}

void check_heads(const TrainingCall& call) {
  const int axis = head_axis(call.layout);
  if (axis >= 0) {
    require(call.query.size(axis) == call.heads, "head_num is [", call.heads,
            "], but got query dim", axis, " [", call.query.size(axis), "].");
  } else {
    // No head axis to compare with: any divisor of H is taken.
    const int64_t width = call.query.size(-1);
    require(width != 0, "H is zero.");
    require(width % call.heads == 0, "h1 [", width, "] should be a multiple of n1Size [",
            call.heads, "].");
  }
  const int64_t kv_heads = call.kv_heads();
  require(kv_heads != 0, "n2Size is zero.");
  require(call.heads % kv_heads == 0, "n1Size [", call.heads, "] should be a multiple of n2Size [",
          kv_heads, "].");
  const bool fits = axis < 0 ? call.key.size(-1) == kv_heads * call.head_dim() &&
                                   call.value.size(-1) % kv_heads == 0
                             : call.value.size(axis) == kv_heads;
  require(fits, "key or value shape is invalid");
}

void check_dims(const TrainingCall& call) {
  const bool hidden = head_axis(call.layout) < 0;
  const int64_t of_query = call.head_dim();
  const int64_t of_key = hidden ? of_query : call.key.size(-1);
  const int64_t of_value = hidden ? call.value.size(-1) / call.kv_heads() : call.value.size(-1);
  require_parameter(of_query == of_key, "qD and kD should be same, but got qD=", of_query,
                    " kD=", of_key);
  require_parameter(of_query >= of_value, "only support kD >= vD, but got kD=", of_key,
                    " vD=", of_value);
  require_parameter(of_query <= kMaxDim, "Head dim must <= 768, but got ", of_query);
}

void check_documented_limits(const TrainingCall& call) {
  require_parameter(call.heads <= kMaxHeads, "head_num ", call.heads, " is not in range [1, 256]");
  const int64_t rows =
      std::max(call.query.size(row_axis(call.layout)), call.key.size(row_axis(call.layout)));
  require_parameter(rows <= kMaxRows, "S or T ", rows, " is not in range [1, 1048576]");
  require_parameter(!call.packed() || call.batch() <= kMaxPackedBatch,
                    "the size of actual_seq_qlen ", call.batch(), " is not in range [1, 2048]");
}

void check_packed(const TrainingCall& call) {
  require(call.query_lengths.size() == call.key_lengths.size(), "VarLen scene, q is not equal kv.");
  const int64_t queries = call.query_rows().back().end;
  const int64_t keys = call.key_rows().back().end;
  require(call.query.size(0) >= queries && call.key.size(0) >= keys, "Query T(", call.query.size(0),
          ") and key T(", call.key.size(0), ") need larger than respectively sum of seqLen(",
          queries, ") and sekvLen(", keys, ").");
}

void check_padded(const TrainingCall& call) {
  const int batch = batch_axis(call.layout);
  const int rows = row_axis(call.layout);
  require(call.query.size(batch) == call.key.size(batch) &&
              call.key.size(batch) == call.value.size(batch) &&
              call.key.size(rows) == call.value.size(rows),
          "query or key shape is invalid");
}

// pse_type 1: [1|B, N, Sq|1, Skv].
void check_pse(const TrainingCall& call) {
  if (!call.pse.defined()) return;
  require(!call.packed(), "pse of a TND call is not modelled by the simulated NPU");
  require(call.pse.dim() == 4, "pse dim should be 4, but got ", call.pse.dim());
  const at::IntArrayRef sizes = call.pse.sizes();
  require(sizes[0] == call.batch() || sizes[0] == 1, "pse batchsize should be 1 or ", call.batch(),
          ", but got ", sizes[0]);
  const bool fits = sizes[1] == call.heads && (sizes[2] == call.longest_query() || sizes[2] == 1) &&
                    sizes[3] == call.longest_key();
  require(fits, "get unsupported pse shape, the shape is ", shape_text(sizes));
}

void check_drop_mask(const TrainingCall& call) {
  if (!call.drop_mask.defined()) return;
  require(call.drop_mask.scalar_type() == at::kByte, "invalid dropMask dtype[",
          data_type_name(call.drop_mask.scalar_type()), "], only support uint8.");
  int64_t scores = 0;
  const std::vector<Range> queries = call.query_rows();
  const std::vector<Range> keys = call.key_rows();
  for (std::size_t i = 0; i < queries.size(); ++i) scores += queries[i].length() * keys[i].length();
  const int64_t bytes = (scores * call.heads + 7) / 8;
  require(call.drop_mask.numel() >= bytes,
          "Input dropMask shapeSize is invalid, it should not be less than ", bytes, ", but got ",
          call.drop_mask.numel());
}

}  // namespace

void check_training_call(const TrainingCall& call) {
  check_types(call);
  check_layout(call);
  check_heads(call);
  check_dims(call);
  check_documented_limits(call);
  if (call.packed()) {
    check_packed(call);
  } else {
    check_padded(call);
  }
  check_pse(call);
  check_training_mask(call);
  check_drop_mask(call);
}

}  // namespace simnpu::op
