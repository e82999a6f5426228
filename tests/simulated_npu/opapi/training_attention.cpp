// FlashAttentionScore and its gradient: the aclnn functions that torch_npu 2.13 calls for
// npu_fusion_attention, its _v2 and _v3, and their backward passes, on a chip older than Ascend950.
//
// Calls that are accepted and wrong give here what a device gives (CN's kernels, op-plugin's
// documents):
// - BSH and SBH with a wrong head count: attention with D' = H / head_num.
// - No atten_mask: full attention, whatever sparse_mode says.
// - sparse_mode 0 with a mask: pre_tockens and next_tockens cut the band out as well.
// - A row whose keys are all masked: the average of V, unless inner_precise 2 or the geometry of
//   modes 0, 3 and 4 asks for zeros, with max -FLT_MAX and sum FLT_MAX.
// - max and sum of a TND call lie in memory as [N, S] of each batch entry, one after the other,
//   though their shape says [T, N, 8], unless softmax_layout is "TND".
// - Rows of a TND call after the last entry are not written, unless a trailing 0 in the lengths
//   asks for it.
#include "attention_math.hpp"
#include "random.hpp"
#include "refusal.hpp"
#include "training_call.hpp"

namespace simnpu::op {
namespace {

constexpr int64_t kCopies = 8;  // the statistics fill a 32-byte block with one float

struct Statistics {
  Tensor max, sum;
};

Visibility visibility(const TrainingCall& call, int64_t entry, int64_t rows, int64_t keys) {
  if (!call.has_mask()) return {};
  const int64_t shift = keys - rows;  // bottom-right alignment, in top-left coordinates
  const Tensor& mask = call.mask;
  switch (call.sparse_mode) {
    case 2:
      return {{}, tile_above(mask, rows, keys, 0)};
    case 3:
      return {{}, tile_above(mask, rows, keys, shift)};
    case 4:
      return {{},
              at::logical_or(tile_above(mask, rows, keys, call.after + shift),
                             tile_below(mask, rows, keys, call.before - shift))};
    default:
      break;
  }
  const Tensor hidden = written_mask(mask, entry, rows, keys, true);
  if (call.sparse_mode == 1) return {{}, hidden};
  return {band(rows, keys, call.before, call.after), hidden};
}

EmptyRows empty_rows(const TrainingCall& call) {
  if (call.inner_precise == 2) return EmptyRows::kZero;
  if (!call.has_mask() || call.packed()) return EmptyRows::kAverage;
  const auto [before, after] = padded_window(call);
  const bool leaves_rows = before < call.longest_query() - call.longest_key() || after < 0;
  return leaves_rows ? EmptyRows::kZero : EmptyRows::kAverage;
}

// [heads, rows, 1] views of one entry's statistics.
Tensor statistics_of(const TrainingCall& call, const Tensor& tensor, int64_t entry, Range rows) {
  if (!call.packed()) return tensor.select(0, entry).slice(1, rows.begin, rows.end);
  if (call.softmax_layout == "same_as_input")
    return tensor.slice(0, rows.begin, rows.end).transpose(0, 1);
  const int64_t length = rows.length();
  const Tensor flat = tensor.view({-1, kCopies});
  return flat.slice(0, rows.begin * call.heads, rows.end * call.heads)
      .view({call.heads, length, kCopies});
}

// Dropout's mask holds the scores of all entries, each [N, Sq, Sk], one after the other.
Tensor keep_mask(const TrainingCall& call, int64_t first, int64_t rows, int64_t keys) {
  if (!call.drop_mask.defined()) return {};
  return unpack_keep_mask(call.drop_mask, first, call.heads * rows * keys)
      .view({call.heads, rows, keys});
}

Tensor pse_of(const TrainingCall& call, int64_t entry) {
  if (!call.pse.defined()) return {};
  return call.pse.select(0, call.pse.size(0) == 1 ? 0 : entry);
}

// Calls visit(entry, query rows, key rows, problem) for each batch entry with rows.
template <class Visit>
void for_each_entry(const TrainingCall& call, Visit visit) {
  const std::vector<Range> queries = call.query_rows();
  const std::vector<Range> keys = call.key_rows();
  int64_t first_score = 0;
  for (int64_t entry = 0; entry < call.batch(); ++entry) {
    const int64_t rows = queries[entry].length();
    const int64_t columns = keys[entry].length();
    if (rows == 0) continue;
    Problem problem;
    problem.query = rows_of(call.query, call.layout, call.heads, entry, queries[entry]);
    problem.key = rows_of(call.key, call.layout, call.kv_heads(), entry, keys[entry]);
    problem.value = rows_of(call.value, call.layout, call.kv_heads(), entry, keys[entry]);
    problem.scale = call.scale;
    if (call.pse.defined())
      problem.bias = pse_of(call, entry) * call.scale;  // scale * (QK^T + pse)
    problem.visible = visibility(call, entry, rows, columns);
    problem.empty_rows = empty_rows(call);
    problem.keep = keep_mask(call, first_score, rows, columns);
    problem.keep_prob = call.keep_prob;
    visit(entry, queries[entry], keys[entry], problem);
    first_score += call.heads * rows * columns;
  }
}

// A trailing length of 0 stands for the rows after the last entry, which see no keys; vllm-ascend
// passes it.
bool asks_for_tail(const TrainingCall& call) {
  return call.packed() && call.query_lengths.back() < call.query_rows().back().begin;
}

void run_forward(const TrainingCall& call, const Out& out, const Statistics& statistics) {
  if (asks_for_tail(call)) {
    for (const Tensor& tensor : {out.view(), statistics.max, statistics.sum}) {
      tensor.slice(0, call.query_rows().back().end).zero_();
    }
  }
  for_each_entry(call, [&](int64_t entry, Range rows, Range, const Problem& problem) {
    const Attention attention = attend(problem);
    rows_of(out.view(), call.layout, call.heads, entry, rows).copy_(attention.out);
    statistics_of(call, statistics.max, entry, rows).copy_(attention.max);
    statistics_of(call, statistics.sum, entry, rows).copy_(attention.sum);
  });
}

struct BackwardInputs {
  Tensor grad_out, max, sum, out;
};

struct BackwardOutputs {
  Out query, key, value, pse;
};

void add_pse_gradient(const TrainingCall& call, const Out& out, int64_t entry,
                      const Tensor& gradient) {
  if (!call.pse.defined()) return;
  Tensor of_entry = gradient * call.scale;
  if (call.pse.size(2) == 1) of_entry = of_entry.sum(1, true);
  out.view().select(0, call.pse.size(0) == 1 ? 0 : entry).add_(of_entry);
}

void run_backward(const TrainingCall& call, const BackwardInputs& in,
                  const BackwardOutputs& grads) {
  for (const Out* grad : {&grads.query, &grads.key, &grads.value, &grads.pse}) {
    if (grad->wanted()) grad->view().zero_();
  }
  for_each_entry(call, [&](int64_t entry, Range rows, Range columns, const Problem& problem) {
    const auto saved = [&](const Tensor& tensor) {
      return statistics_of(call, tensor, entry, rows).slice(-1, 0, 1);
    };
    const Tensor out = rows_of(in.out, call.layout, call.heads, entry, rows);
    const Tensor grad_out = rows_of(in.grad_out, call.layout, call.heads, entry, rows);
    const Gradients gradients =
        attend_backward(problem, out, saved(in.max), saved(in.sum), grad_out);
    const auto write = [&](const Out& grad, int64_t heads, Range range, const Tensor& value) {
      rows_of(grad.view(), call.layout, heads, entry, range).copy_(value);
    };
    write(grads.query, call.heads, rows, gradients.query);
    write(grads.key, call.kv_heads(), columns, gradients.key);
    write(grads.value, call.kv_heads(), columns, gradients.value);
    add_pse_gradient(call, grads.pse, entry, gradients.bias);
  });
}

void check_modelled(const TensorList& others, int64_t pse_type) {
  for (const Tensor& other : others) {
    require_parameter(!other.defined(),
                      "padding_mask, separate rope parts and sink are not modelled");
  }
  require_parameter(pse_type == 1, "pse_type ", pse_type, " is not modelled");
}

Work plan_forward(TrainingCall call, const TensorList& others, int64_t pse_type, Out max, Out sum,
                  Out out) {
  check_modelled(others, pse_type);
  check_training_call(call);
  return
      [call = std::move(call), max, sum, out] { run_forward(call, out, {max.view(), sum.view()}); };
}

Work plan_backward(TrainingCall call, const TensorList& others, int64_t pse_type, BackwardInputs in,
                   BackwardOutputs grads) {
  check_modelled(others, pse_type);
  check_training_call(call);
  if (!in.max.defined() || !in.sum.defined() || !in.out.defined()) {
    throw Refused(kMissingParameter,
                  parameter_text("softmax_max, softmax_sum and attention_in are required"));
  }
  return [call = std::move(call), in, grads] { run_backward(call, in, grads); };
}

}  // namespace

// The arguments that several versions share, in their order.
#define QKV Tensor query, Tensor key, Tensor value
#define QKV_ROPE Tensor query, Tensor query_rope, Tensor key, Tensor key_rope, Tensor value
#define MASKS Tensor pse, Tensor drop_mask, Tensor padding, Tensor mask
#define SAVED Tensor max, Tensor sum, Tensor, Tensor attention
#define LENGTHS IntArray query_lengths, IntArray key_lengths
#define ATTRIBUTES                                                              \
  double scale, double keep_prob, int64_t before, int64_t after, int64_t heads, \
      std::string layout, int64_t inner_precise, int64_t sparse_mode
#define RESULTS Out max, Out sum, Out, Out out
#define GRADIENTS Out grad_query, Out grad_key, Out grad_value, Out grad_pse
#define CALL(query_lengths, key_lengths, softmax_layout)                                           \
  TrainingCall {                                                                                   \
    query, key, value, pse, drop_mask, mask, query_lengths, key_lengths, scale, keep_prob, before, \
        after, heads, layout, inner_precise, sparse_mode, softmax_layout                           \
  }
#define BACKWARD                                             \
  BackwardInputs{dy, max, sum, attention}, BackwardOutputs { \
    grad_query, grad_key, grad_value, grad_pse               \
  }

OPERATOR(aclnnFlashAttentionScore, [](QKV, MASKS, IntArray, ATTRIBUTES, RESULTS) -> Work {
  return plan_forward(CALL({}, {}, ""), {padding}, 1, max, sum, out);
})
OPERATOR(aclnnFlashAttentionScoreV2,
         [](QKV, MASKS, IntArray, IntArray, IntArray, ATTRIBUTES, int64_t pse_type, RESULTS)
             -> Work { return plan_forward(CALL({}, {}, ""), {padding}, pse_type, max, sum, out); })
OPERATOR(aclnnFlashAttentionScoreV3,
         [](QKV, MASKS, Tensor sink, IntArray, IntArray, IntArray, ATTRIBUTES, int64_t pse_type,
            RESULTS) -> Work {
           return plan_forward(CALL({}, {}, ""), {padding, sink}, pse_type, max, sum, out);
         })
OPERATOR(aclnnFlashAttentionVarLenScore,
         [](QKV, MASKS, IntArray, LENGTHS, ATTRIBUTES, RESULTS) -> Work {
           return plan_forward(CALL(query_lengths, key_lengths, ""), {padding}, 1, max, sum, out);
         })
OPERATOR(aclnnFlashAttentionVarLenScoreV2,
         [](QKV, MASKS, IntArray, LENGTHS, IntArray, IntArray, ATTRIBUTES, int64_t pse_type,
            RESULTS) -> Work {
           return plan_forward(CALL(query_lengths, key_lengths, ""), {padding}, pse_type, max, sum,
                               out);
         })
OPERATOR(aclnnFlashAttentionVarLenScoreV4,
         [](QKV, MASKS, IntArray, LENGTHS, ATTRIBUTES, std::string softmax_layout,
            RESULTS) -> Work {
           return plan_forward(CALL(query_lengths, key_lengths, softmax_layout), {padding}, 1, max,
                               sum, out);
         })
OPERATOR(aclnnFlashAttentionVarLenScoreV5,
         [](QKV_ROPE, MASKS, Tensor sink, IntArray, LENGTHS, IntArray, IntArray, ATTRIBUTES,
            int64_t pse_type, std::string softmax_layout, RESULTS) -> Work {
           return plan_forward(CALL(query_lengths, key_lengths, softmax_layout),
                               {padding, sink, query_rope, key_rope}, pse_type, max, sum, out);
         })

OPERATOR(aclnnFlashAttentionScoreGrad,
         [](QKV, Tensor dy, MASKS, SAVED, IntArray, ATTRIBUTES, GRADIENTS) -> Work {
           return plan_backward(CALL({}, {}, ""), {padding}, 1, BACKWARD);
         })
OPERATOR(aclnnFlashAttentionScoreGradV2,
         [](QKV, Tensor dy, MASKS, SAVED, IntArray, IntArray, IntArray, ATTRIBUTES,
            int64_t pse_type, GRADIENTS) -> Work {
           return plan_backward(CALL({}, {}, ""), {padding}, pse_type, BACKWARD);
         })
OPERATOR(aclnnFlashAttentionScoreGradV3,
         [](QKV, Tensor dy, MASKS, SAVED, Tensor sink, IntArray, IntArray, IntArray, ATTRIBUTES,
            int64_t pse_type, GRADIENTS, Out) -> Work {
           return plan_backward(CALL({}, {}, ""), {padding, sink}, pse_type, BACKWARD);
         })
OPERATOR(aclnnFlashAttentionUnpaddingScoreGrad,
         [](QKV, Tensor dy, MASKS, SAVED, IntArray, LENGTHS, ATTRIBUTES, GRADIENTS) -> Work {
           return plan_backward(CALL(query_lengths, key_lengths, ""), {padding}, 1, BACKWARD);
         })
OPERATOR(aclnnFlashAttentionUnpaddingScoreGradV2,
         [](QKV, Tensor dy, MASKS, SAVED, IntArray, LENGTHS, IntArray, IntArray, ATTRIBUTES,
            int64_t pse_type, GRADIENTS) -> Work {
           return plan_backward(CALL(query_lengths, key_lengths, ""), {padding}, pse_type,
                                BACKWARD);
         })
OPERATOR(aclnnFlashAttentionUnpaddingScoreGradV4,
         [](QKV, Tensor dy, MASKS, SAVED, IntArray, LENGTHS, ATTRIBUTES, GRADIENTS,
            std::string softmax_layout) -> Work {
           return plan_backward(CALL(query_lengths, key_lengths, softmax_layout), {padding}, 1,
                                BACKWARD);
         })
OPERATOR(aclnnFlashAttentionUnpaddingScoreGradV5,
         [](QKV_ROPE, Tensor dy, MASKS, SAVED, Tensor sink, IntArray, LENGTHS, IntArray, IntArray,
            ATTRIBUTES, int64_t pse_type, std::string softmax_layout, Out grad_query, Out,
            Out grad_key, Out, Out grad_value, Out grad_pse, Out) -> Work {
           return plan_backward(CALL(query_lengths, key_lengths, softmax_layout),
                                {padding, sink, query_rope, key_rope}, pse_type, BACKWARD);
         })

}  // namespace simnpu::op
