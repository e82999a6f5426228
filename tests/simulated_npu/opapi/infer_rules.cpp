// The argument rules of FusedInferAttentionScore, with the texts of CN's tiling code (refusal.hpp).
// The text for head counts is that of CANN in April 2026, seen in sgl-project/sglang#23572.
#include <set>

#include "infer_call.hpp"
#include "refusal.hpp"

namespace simnpu::op {
namespace {

constexpr int64_t kMaxHeads = 256;
constexpr int64_t kMaxGroup = 64;
constexpr int64_t kMaxDim = 512;
constexpr int64_t kMaxBatch = 65536;
constexpr int64_t kMaxPackedRows = 1048576;
constexpr int64_t kMaxSingleQueryKeys = 262144;
constexpr int64_t kMaxRowElements = 65535;  // N * D in BSH and BSND

template <class... Parts>
void require(bool kept, const Parts&... parts) {
  require_tiling(kept, "FusedInferAttentionScore", kTilingFailed, parts...);
}

void check_types(const InferCall& call) {
  const at::ScalarType type = call.query.scalar_type();
  require(type != at::kFloat, "inputType(0) and outputType(0) can not be DT_FLOAT");
  require(type == at::kHalf || type == at::kBFloat16, "query's dtype is ", data_type_name(type),
          ", it should be DT_FLOAT16 or DT_BF16 (quantised inputs are not modelled).");
  for (const auto& [name, tensor] : {std::pair("key", call.key), std::pair("value", call.value)}) {
    require(tensor.scalar_type() == type, name, "'s dtype is ",
            data_type_name(tensor.scalar_type()), ", it should be ", data_type_name(type), ".");
  }
}

// op-plugin accepts more layouts than the kernels for several query rows (PFA) do.
void check_layout(const InferCall& call) {
  static const std::set<std::string> known = {"BSH", "BSND",    "BNSD", "BNSD_BSND",
                                              "TND", "NTD_TND", "NSD"};
  require(known.count(call.layout) != 0, "invalid input layout:", call.layout, ".");
  const auto rank = static_cast<int64_t>(call.from().size());
  require(call.query.dim() == rank && call.key.dim() == rank && call.value.dim() == rank,
          "Layout is ", call.layout, ", queryDims, keyDims and valueDims must be ", rank,
          "! but actual values are ", call.query.dim(), ", ", call.key.dim(), ", ",
          call.value.dim(), ".");
  require(call.layout != "BNSD_BSND" || call.num_queries() != 1,
          "BNSD_BSND layout is not supported when S is 1!");
}

void check_query_heads(const InferCall& call) {
  const std::string from = call.from();
  const int axis = head_axis(from);
  if (axis < 0) {
    require(call.query.size(-1) % call.heads == 0, "H(", call.query.size(-1),
            ") of query must be a multiple of numHeads(", call.heads, ")!");
    return;  // BSH has no head axis to compare with: any divisor of H is taken
  }
  IntArray expected = call.query.sizes().vec();
  expected[axis] = call.heads;
  require(call.query.sizes() == at::IntArrayRef(expected), "[CheckQShape] query layout is ", from,
          ", shape ", shape_text(call.query.sizes()), " should be equal to ", shape_text(expected));
}

void check_key_heads(const InferCall& call) {
  const int axis = head_axis(call.from());
  if (call.packed()) {
    // The attribute is ignored: key's own axis counts.
    const int64_t of_key = call.key.size(axis);
    require(of_key == call.value.size(axis), "When layout is ", call.layout,
            ", the values of keyN(", of_key, "), valueN(", call.value.size(axis),
            ") must be equal");
    require(of_key > 0 && call.heads % of_key == 0, "When layout is ", call.layout,
            ", the values of queryN(", call.heads, ") should be a multiple of keyN(", of_key, ").");
    return;
  }
  if (axis >= 0) {
    for (const auto& [name, tensor] :
         {std::pair("key", call.key), std::pair("value", call.value)}) {
      require(tensor.size(axis) == call.kv_heads, "numHeads(", tensor.size(axis), ") in ", name,
              " shape do not match numKeyValueHeads(", call.kv_heads, ") in attr!");
    }
  }
  require(call.heads % call.kv_heads == 0, "numHeads(", call.heads,
          ") must be divisible by numKeyValueHeads(", call.kv_heads, ")!");
}

void check_heads(const InferCall& call) {
  require(call.kv_heads > 0, "numHeads(", call.heads, ") or numKeyValueHeads(", call.kv_heads,
          ") is negative!");
  require(call.heads <= kMaxHeads, "the query's heads num(", call.heads,
          ") should not be more than 256!");
  check_query_heads(call);
  check_key_heads(call);
  const int64_t kv_heads = call.packed() ? call.key.size(head_axis(call.from())) : call.kv_heads;
  require(call.heads / kv_heads <= kMaxGroup,
          "numHeads / numKeyValueHeads = ", call.heads / kv_heads, ", cannot be larger than 64");
}

void check_dims(const InferCall& call) {
  const int64_t of_query = call.head_dim();
  const int64_t of_key = call.dim_of(call.key, call.kv_heads);
  const int64_t of_value = call.dim_of(call.value, call.kv_heads);
  require(
      of_query <= kMaxDim,
      "D should be less than or equal to 512 of Q/KV shape! but now D = ", of_query,
      ". When layout is BNSD, D is the last dimension of Q/KV shape, and layout is BSH, D = h / n");
  require(of_query % 16 == 0, "D should be 16 elements aligned when with FP16/BF16 dtype!");
  if (call.packed()) {
    const bool same = of_query == of_key && of_key == of_value;
    const bool known = of_query == 64 || of_query == 128 || of_query == 192;
    const bool narrow_value = of_query == 192 && of_key == 192 && of_value == 128;
    require((same && known) || narrow_value, "When layout is ", call.layout, ", queryD(", of_query,
            "), keyD(", of_key, ") and valueD(", of_value,
            ") must be same equal 192/128/64, or queryD and keyD equal 192 and valueD equal 128.");
    const int64_t group = call.heads / call.key.size(head_axis(call.from()));
    require(of_value != 192 || group == 1, "When layout is ", call.layout, ", When G(", group,
            ") not 1, valueD(", of_value, ") should not be 192.");
    require(call.layout != "NTD_TND" || of_value == 128, "When layout is NTD_TND, valueD(",
            of_value, ") must be 128!");
    return;
  }
  require(of_query == of_key && of_key == of_value,
          "layout BSH, BSND, BNSD, BNSD_BSND, queryD keyD valueD must be equal!");
  const bool rows_whole = call.from() == "BSH" || call.from() == "BSND";
  require(!rows_whole || call.heads * of_query < kMaxRowElements, "N * D (", call.heads, " * ",
          of_query, ") must be smaller than 65535 when input layout is ", call.from(), ".");
}

void check_padded_lengths(const InferCall& call, const char* whose, const IntArray& lengths,
                          int64_t rows) {
  const auto given = static_cast<int64_t>(lengths.size());
  require(given <= 1 || given >= call.batch(), "Dim(", given, ") of the ", whose,
          "'s actual sequence lengths must equal to 1 or greater than or equal to batch size(",
          call.batch(), ")!");
  for (int64_t i = 0; i < std::min(given, call.batch()); ++i) {
    require(lengths[i] >= 0 && lengths[i] <= rows, "The ", whose, "'s actual sequence lengths[", i,
            "](", lengths[i], ") must be in range[0, ", rows, "]!");
  }
}

void check_padded(const InferCall& call) {
  if (const int axis = batch_axis(call.from()); axis >= 0) {
    require(call.query.size(axis) == call.key.size(axis),
            "query batch must be equal to key/value batch, query batch = ", call.query.size(axis),
            " , key/value batch = ", call.key.size(axis), " .");
  }
  require(call.batch() <= kMaxBatch, "batch size should <= 65536, but batch size = ", call.batch());
  require(call.num_keys() == call.value.size(row_axis(call.from())),
          "key value consistency check failed!");
  require(!call.single_query() || call.num_keys() <= kMaxSingleQueryKeys, "KV_S(", call.num_keys(),
          ") should not be larger than 262144 when Q_S is 1.");
  check_padded_lengths(call, "query", call.query_lengths, call.num_queries());
  check_padded_lengths(call, "key/value", call.key_lengths, call.num_keys());
}

void check_cumulative(const InferCall& call, const char* whose, const char* array,
                      const IntArray& sums) {
  for (std::size_t i = 1; i < sums.size(); ++i) {
    require(sums[i] >= sums[i - 1], "When layout is ", call.layout, ", the ", whose,
            "'s actual sequence lengths must be not decreasing, but it's not at ", i, ", ", array,
            "[", i - 1, "]=", sums[i - 1], ", ", array, "[", i, "]=", sums[i]);
  }
}

void check_packed(const InferCall& call) {
  const auto& queries = call.query_lengths;
  const auto& keys = call.key_lengths;
  require(!queries.empty(), "When layout is ", call.layout,
          ", actualSequenceLengthQ is required, but now is nullptr!");
  require(!keys.empty(), "When layout is ", call.layout,
          ", actualSequenceLengthKV is required, but now is nullptr!");
  const int64_t of_value = call.value.size(row_axis(call.from()));
  require(call.num_queries() == queries.back(), "When layout is ", call.layout, ", queryT(",
          call.num_queries(), ") must be equal to the last element of actualSequenceLengthQ(",
          queries.back(), ")");
  require(call.num_keys() == keys.back() && of_value == keys.back(), "When layout is ", call.layout,
          " and PA not enabled, keyT(", call.num_keys(), ") and valueT(", of_value,
          ") must be equal to the last element of actualSeqenceLengthKV(", keys.back(), ")");
  require(std::max(call.num_queries(), call.num_keys()) <= kMaxPackedRows, "When layout is ",
          call.layout, ", T cannot be greater than 1048576(1M), queryT=", call.num_queries(),
          ", keyT=", call.num_keys(), ", valueT=", of_value);
  require(call.query.scalar_type() == at::kBFloat16, "When layout is ", call.layout,
          ", inputDataType should be bf16");
  require(queries.size() == keys.size(), "When layout is ", call.layout,
          ", the length of actualSequenceLengthQ(", queries.size(), ") and actualSequenceLengthKV(",
          keys.size(), ") must be equal.");
  require(queries.front() >= 0 && keys.front() >= 0, "When layout is ", call.layout,
          ", actualSequenceLengthQ[0]=", queries.front(),
          " and actualSequenceLengthKV[0]=", keys.front(), " must >= 0");
  check_cumulative(call, "query", "actSeqLen", queries);
  check_cumulative(call, "key/value", "actSeqLenKV", keys);
}

// pse_shift: the type of query, [1|B, N, >=Sq, >=Skv], no broadcasting over heads.
void check_pse(const InferCall& call) {
  if (!call.pse.defined()) return;
  require(!call.packed(), "When Layout is TND, not support PSE");
  const char* name = call.query.scalar_type() == at::kHalf ? "fp16" : "bf16";
  require(call.pse.scalar_type() == call.query.scalar_type(), "q type is ", name,
          ", but pse shift type is not ", name,
          ", pse shift type = ", data_type_name(call.pse.scalar_type()));
  require(call.pse.dim() == 4, "pse shift shape must be 4 dimension, rather than ", call.pse.dim(),
          " dimension");
  const at::IntArrayRef sizes = call.pse.sizes();
  const bool fits = (sizes[0] == 1 || sizes[0] == call.batch()) && sizes[1] == call.heads &&
                    sizes[2] >= call.num_queries() && sizes[3] >= call.num_keys();
  require(fits, "pse shift shape must be [1 or ", call.batch(), ", ", call.heads,
          ", >=", call.num_queries(), ", >=", call.num_keys(), "], but now it is ",
          shape_text(sizes));
}

}  // namespace

int64_t InferCall::batch() const {
  if (packed()) return static_cast<int64_t>(query_lengths.size());
  const int axis = batch_axis(from());
  return axis < 0 ? 1 : query.size(axis);
}

int64_t InferCall::dim_of(const Tensor& tensor, int64_t num_heads) const {
  return head_axis(from()) < 0 ? tensor.size(-1) / num_heads : tensor.size(-1);
}

void check_infer_call(InferCall& call) {
  check_types(call);
  check_layout(call);
  // 0 means as many as query, not as many as key has.
  if (call.kv_heads == 0) call.kv_heads = call.heads;
  check_heads(call);
  check_dims(call);
  if (call.packed()) {
    check_packed(call);
  } else {
    check_padded(call);
  }
  check_infer_mask(call);
  check_pse(call);
}

}  // namespace simnpu::op
