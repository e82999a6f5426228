// The rules of FusedInferAttentionScore about atten_mask, sparse_mode, pre_tokens and next_tokens
// (CN CheckAttenMaskShape, ProcessAttenMask, CheckVarLenPreNextToken).
#include "attention_mask.hpp"
#include "infer_call.hpp"
#include "refusal.hpp"

namespace simnpu::op {
namespace {

template <class... Parts>
void require(bool kept, const Parts&... parts) {
  require_tiling(kept, "FusedInferAttentionScore", kTilingFailed, parts...);
}

void check_type(const InferCall& call) {
  if (!call.mask.defined()) return;
  const at::ScalarType type = call.mask.scalar_type();
  require(type == at::kBool || type == at::kChar || type == at::kByte,
          "Invalid attention mask datatype! Only support BOOL, INT8 and UINT8");
}

bool is_tile(const Tensor& mask) {
  const at::IntArrayRef sizes = mask.sizes();
  return (sizes == at::IntArrayRef({kTileSize, kTileSize})) ||
         (sizes == at::IntArrayRef({1, kTileSize, kTileSize})) ||
         (sizes == at::IntArrayRef({1, 1, kTileSize, kTileSize}));
}

// Modes 0 and 1: at least [Sq, Skv], of one batch entry or of all. The head axis is not looked at.
void check_written(const InferCall& call) {
  const Tensor& mask = call.mask;
  require(mask.dim() >= 2 && mask.dim() <= 4, "attenMask dim(", mask.dim(),
          ") must be 2 or 3 or 4!");
  const int64_t batch = mask.dim() == 2 ? 1 : mask.size(0);
  require((batch == 1 || batch == call.batch()) && mask.size(-2) >= call.num_queries() &&
              mask.size(-1) >= call.num_keys(),
          "attenMask batch(", batch, ") must be 1 or ", call.batch(), ", attenMask Q_S(",
          mask.size(-2), ") must be larger than sQ(", call.num_queries(), "), attenMask KV_S(",
          mask.size(-1), ") must be larger than sK(", call.num_keys(), "), please check");
}

void check_written_band(const InferCall& call) {
  const int64_t before = call.before;
  const int64_t after = call.after;
  require(before >= 0 || after >= 0,
          "preTokens and nextokens cannot neither be negative number, preTokens = ", before,
          ", nextTokens = ", after, ".");
  require(-after <= before, "nexttoken line should be higher than pretoken line.");
  require(after >= 0 || -after < call.num_queries(),
          "nextTokens absolute value should be smaller than length of q, nextTokens = ", after,
          ", length of q = ", call.num_queries(), ".");
  require(before >= 0 || -before < call.num_keys(),
          "preToken absolute value should be smaller than length of k and v, preTokens = ", before,
          ", seqLengthKV = ", call.num_keys());
}

void check_band(const InferCall& call) {
  require(call.before >= 0 || call.after >= 0,
          "preTokens and nextTokens must not be negative number in band mode, preTokens = ",
          call.before, " , nextTokens = ", call.after, " .");
  require(-call.after <= call.before, "nexttoken line should be higher than pretoken line.");
}

// Several query rows, a batch axis.
void check_padded(const InferCall& call) {
  const int64_t mode = call.sparse_mode;
  require(mode >= 0 && mode <= 4, "sparse_mode = ", mode, " is out of range.");
  require(mode == 0 || call.has_mask(), "attenMask should not be null when sparse_mode is ", mode,
          ".");
  if (!call.has_mask()) return;
  if (mode >= 2) {
    require(is_tile(call.mask),
            "attenMask shape must be (2048, 2048) or (1, 2048, 2048) or (1, 1, 2048, 2048) when "
            "sparse mode = ",
            mode);
  } else {
    check_written(call);
  }
  if (mode == 0) check_written_band(call);
  if (mode == 4) check_band(call);
}

// One query row: no mask is needed whatever the mode, a written one has a row a batch entry.
void check_single_query(const InferCall& call) {
  if (!call.has_mask()) return;
  if (call.sparse_mode == 3 || call.sparse_mode == 4) {
    require(call.mask.sizes() == at::IntArrayRef({kTileSize, kTileSize}),
            "when sparse = ", call.sparse_mode,
            ", atten_mask tensor shape must be [2048, 2048] in MLA.");
    return;
  }
  require(call.mask.size(0) == call.batch(), "batchSize[", call.mask.size(0),
          "] of atten_mask must be equal to batchSize[", call.batch(), "] of query.");
  require(call.mask.size(-1) >= call.num_keys(), "s Size[", call.mask.size(-1),
          "] of atten_mask must be greater than or equal to sMax[", call.num_keys(), "].");
}

void check_packed(const InferCall& call) {
  const int64_t mode = call.sparse_mode;
  require(mode == 0 || mode == 3 || mode == 4,
          "When Layout is TND, sparseMode only support 0,3 or 4, but sparseMode = ", mode);
  if (mode == 0) {
    require(!call.has_mask(), "When Layout is TND, sparseMode = 0 not support attentionMask.");
    return;
  }
  require(call.has_mask(), "attenMask should not be null when sparse_mode is ", mode, ".");
  require(is_tile(call.mask),
          "attenMask shape must be (2048, 2048) or (1, 2048, 2048) or (1, 1, 2048, 2048) when "
          "sparse mode = ",
          mode);
  const std::vector<Range> queries = packed_rows(call.query_lengths);
  const std::vector<Range> keys = packed_rows(call.key_lengths);
  if (mode == 4) {
    const int64_t dim = call.value.size(-1);
    require(dim == 64 || dim == 128,
            "When Layout is TND, sparseMode = 4 only support valueD equal 64/128.");
    require(call.before + call.after >= 0, "The sum of preTokens[", call.before,
            "] and nextTokens[", call.after, "] must be greater than or equal to 0.");
  }
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const int64_t rows = queries[i].length();
    const int64_t columns = keys[i].length();
    if (mode == 3) {
      require(rows <= columns, "When layout is TND and sparse = 3 ,Batch[", i, "], need s1[", rows,
              "] <= s2[", columns, "].");
    } else if (rows != 0 && columns != 0) {
      require(rows + call.before >= 0 && columns + call.after >= 0, "Batch[", i, "], actualSeqLen[",
              rows, "] + preTokens[", call.before,
              "] must be greater than or equal to 0 and actualSeqLenKv[", columns,
              "] + nextTokens[", call.after, "] must be greater than or equal to 0");
    }
  }
}

}  // namespace

void check_infer_mask(const InferCall& call) {
  check_type(call);
  if (call.packed()) {
    check_packed(call);
  } else if (call.single_query()) {
    check_single_query(call);
  } else {
    check_padded(call);
  }
}

}  // namespace simnpu::op
