// aclnnFusedInferAttentionScoreV2 to V5, the versions that torch_npu 2.13 calls: V3 for
// npu_fused_infer_attention_score, V4 for its _v2, V2 on a CANN older than 8.1, V5 on Ascend950.
//
// Calls that are accepted and wrong give here what a device gives (CN's tiling and kernels):
// - BSH with a wrong head count: attention with D' = H / num_heads.
// - A mask for each head, [B, N, Sq, Skv]: only head 0's is used.
// - sparse_mode 0 with a mask: pre_tokens and next_tokens cut the band out as well.
// - A row whose keys are all masked: the average of V, with the LSE of equal scores of -FLT_MAX,
//   unless bit 1 of inner_precise or a compressed mode asks for zeros and an LSE of +inf.
// - The content of the compressed mask is taken as it is.
// - key or value not contiguous: the vendor documents that as unsupported, no check refuses it, and
//   unlike query they are TensorLists, for which callers make them contiguous themselves (sglang).
//   Read here as if they were row-major, from their first element on.
#include <limits>

#include "attention_math.hpp"
#include "infer_call.hpp"
#include "refusal.hpp"

namespace simnpu::op {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What a kernel sees that reads a tensor's memory row-major whatever its strides say.
Tensor read_row_major(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  TORCH_CHECK(device_of(tensor.data_ptr(), tensor.nbytes()) >= 0,
              "the device address is out of range: ", tensor.numel(),
              " elements read row-major from a tensor of strides ", tensor.strides());
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.options());
}

// One query row: the row of entry b starts b rows of the last size into the mask's memory, whatever
// the axes between (CN incre_flash_attention_allvec_new.h, attenMaskCoreOffset).
Tensor single_query_mask(const Tensor& mask, int64_t batch, int64_t keys) {
  const int64_t begin = batch * mask.size(-1);
  return mask.flatten().slice(0, begin, begin + keys).to(at::kBool).view({1, 1, keys});
}

Visibility visibility(const InferCall& call, int64_t batch, int64_t rows, int64_t keys) {
  if (!call.has_mask()) return {};
  const int64_t before = std::min(call.before, kMaxTokens);
  const int64_t after = std::min(call.after, kMaxTokens);
  const int64_t shift = keys - rows;  // bottom-right alignment, in top-left coordinates
  const Tensor& mask = call.mask;
  switch (call.sparse_mode) {
    case 2:
      return {{}, tile_above(mask, rows, keys, 0)};
    case 3:
      return {{}, tile_above(mask, rows, keys, shift)};
    case 4:
      return {{},
              at::logical_or(tile_above(mask, rows, keys, after + shift),
                             tile_below(mask, rows, keys, before - shift))};
    default:
      break;
  }
  const Tensor hidden = call.single_query() ? single_query_mask(mask, batch, keys)
                                            : written_mask(mask, batch, rows, keys, false);
  if (call.sparse_mode == 1 || call.single_query()) return {{}, hidden};
  return {band(rows, keys, before, after), hidden};
}

Tensor bias(const InferCall& call, int64_t batch, int64_t rows, int64_t keys) {
  if (!call.pse.defined()) return {};
  const Tensor entry = call.pse.select(0, call.pse.size(0) == 1 ? 0 : batch);
  return entry.slice(1, 0, rows).slice(2, 0, keys);
}

void run_entry(const InferCall& call, int64_t batch, Range rows, Range keys) {
  const std::string from = call.from();
  Problem problem;
  problem.query = rows_of(call.query, from, call.heads, batch, rows);
  problem.key = rows_of(read_row_major(call.key), from, call.kv_heads, batch, keys);
  problem.value = rows_of(read_row_major(call.value), from, call.kv_heads, batch, keys);
  problem.scale = call.scale;
  problem.bias = bias(call, batch, rows.length(), keys.length());
  problem.visible = visibility(call, batch, rows.length(), keys.length());
  const bool corrects_rows = (call.inner_precise >> 1 & 1) != 0 || call.sparse_mode >= 2;
  problem.empty_rows = corrects_rows ? EmptyRows::kZero : EmptyRows::kAverage;

  const Attention attention = attend(problem);
  rows_of(call.out.view(), output_layout(call.layout), call.heads, batch, rows)
      .copy_(attention.out);
  if (!call.wants_lse) return;
  const Tensor lse = at::where(attention.zero, kInfinity, attention.max + attention.sum.log());
  // [T, N, 1] for packed layouts, [B, N, S, 1] for all others.
  rows_of(call.lse.view(), call.packed() ? "TND" : "BNSD", call.heads, batch, rows).copy_(lse);
}

void run(const InferCall& call) {
  // Rows of no entry: zeros, and an LSE that says invalid.
  call.out.view().zero_();
  if (call.wants_lse) call.lse.view().fill_(kInfinity);
  const int64_t batch = call.batch();
  const std::vector<Range> rows = call.packed()
                                      ? packed_rows(call.query_lengths)
                                      : padded_rows(call.query_lengths, batch, call.num_queries());
  const std::vector<Range> keys = call.packed()
                                      ? packed_rows(call.key_lengths)
                                      : padded_rows(call.key_lengths, batch, call.num_keys());
  for (int64_t entry = 0; entry < batch; ++entry) {
    if (rows[entry].length() != 0) run_entry(call, entry, rows[entry], keys[entry]);
  }
}

void check_modelled(const TensorList& keys, const TensorList& values, const TensorList& others) {
  require_parameter(keys.size() == 1 && values.size() == 1,
                    "key and value as lists of several tensors are not modelled");
  for (const Tensor& other : others) {
    require_parameter(
        !other.defined(),
        "quantisation, paged attention, left padding, shared prefixes, separate rope parts and "
        "learnable_sink are not modelled");
  }
}

Work plan_infer(InferCall call) {
  check_infer_call(call);
  if (call.packed()) call.kv_heads = call.key.size(head_axis(call.from()));
  return [call = std::move(call)] { run(call); };
}

}  // namespace

// The arguments that all versions share, in their order; each version adds some after them.
#define INFER_INPUTS                                                                               \
  Tensor query, TensorList key, TensorList value, Tensor pse, Tensor mask, IntArray query_lengths, \
      IntArray key_lengths, Tensor dequant1, Tensor quant1, Tensor dequant2, Tensor quant2,        \
      Tensor quant_offset2, Tensor antiquant_scale, Tensor antiquant_offset, Tensor block_table,   \
      Tensor query_padding, Tensor key_padding, Tensor key_scale, Tensor key_offset,               \
      Tensor value_scale, Tensor value_offset, Tensor key_prefix, Tensor value_prefix, IntArray
#define INFER_ATTRIBUTES                                                              \
  int64_t heads, double scale, int64_t before, int64_t after, std::string layout,     \
      int64_t kv_heads, int64_t sparse_mode, int64_t inner_precise, int64_t, int64_t, \
      bool wants_lse, int64_t, int64_t
#define PLAN_INFER(...)                                                                           \
  check_modelled(                                                                                 \
      key, value,                                                                                 \
      {dequant1, quant1, dequant2, quant2, quant_offset2, antiquant_scale, antiquant_offset,      \
       block_table, query_padding, key_padding, key_scale, key_offset, value_scale, value_offset, \
       key_prefix, value_prefix __VA_OPT__(, ) __VA_ARGS__});                                     \
  return plan_infer({query, key[0], value[0], pse, mask, query_lengths, key_lengths, heads,       \
                     kv_heads, scale, before, after, layout, sparse_mode, inner_precise,          \
                     wants_lse, out, lse});

OPERATOR(aclnnFusedInferAttentionScoreV2,
         [](INFER_INPUTS, INFER_ATTRIBUTES, Out out, Out lse) -> Work { PLAN_INFER() })
OPERATOR(aclnnFusedInferAttentionScoreV3,
         [](INFER_INPUTS, Tensor query_rope, Tensor key_rope, Tensor rope_scale, INFER_ATTRIBUTES,
            Out out, Out lse) -> Work { PLAN_INFER(query_rope, key_rope, rope_scale) })
OPERATOR(aclnnFusedInferAttentionScoreV4,
         [](INFER_INPUTS, Tensor query_rope, Tensor key_rope, Tensor rope_scale, Tensor query_scale,
            Tensor sink, INFER_ATTRIBUTES, int64_t, Out out,
            Out lse) -> Work { PLAN_INFER(query_rope, key_rope, rope_scale, query_scale, sink) })
OPERATOR(aclnnFusedInferAttentionScoreV5,
         [](INFER_INPUTS, Tensor query_rope, Tensor key_rope, Tensor rope_scale, Tensor query_scale,
            Tensor sink, Tensor query_start, Tensor key_start, INFER_ATTRIBUTES, int64_t, int64_t,
            Out out, Out lse) -> Work {
           PLAN_INFER(query_rope, key_rope, rope_scale, query_scale, sink, query_start, key_start)
         })

}  // namespace simnpu::op
