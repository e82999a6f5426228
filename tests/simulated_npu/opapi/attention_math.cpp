#include "attention_math.hpp"

#include <limits>

#include "../runtime.hpp"

namespace simnpu::op {
namespace {

constexpr float kMost = std::numeric_limits<float>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor wide(const at::Tensor& tensor) {
  return tensor.to(at::kFloat);
}

// [Nkv, S, D] -> [N, S, D], each key/value head for the query heads of its group.
at::Tensor for_each_query_head(const at::Tensor& tensor, int64_t heads) {
  const int64_t group = heads / tensor.size(0);
  return group == 1 ? wide(tensor) : wide(tensor).repeat_interleave(group, 0);
}

// [N, S, D] -> [Nkv, S, D], the transpose of the above.
at::Tensor sum_over_groups(const at::Tensor& tensor, int64_t kv_heads) {
  if (tensor.size(0) == kv_heads) return tensor;
  return tensor.unflatten(0, {kv_heads, tensor.size(0) / kv_heads}).sum(1);
}

// [N, Sq, Sk]: -FLT_MAX where hidden, -inf where not computed.
at::Tensor scores_of(const Problem& problem) {
  const at::Tensor key = for_each_query_head(problem.key, problem.query.size(0));
  at::Tensor scores = at::bmm(wide(problem.query), key.transpose(1, 2)) * problem.scale;
  if (problem.bias.defined()) scores = scores + wide(problem.bias);
  const auto& [computed, hidden] = problem.visible;
  if (hidden.defined()) scores = scores.masked_fill(hidden, -kMost);
  if (computed.defined()) scores = scores.masked_fill(at::logical_not(computed), -kInfinity);
  return scores;
}

at::Tensor dropped(const at::Tensor& weights, const Problem& problem) {
  if (!problem.keep.defined()) return weights;
  return weights * problem.keep / problem.keep_prob;
}

}  // namespace

Attention attend(const Problem& problem) {
  const int64_t heads = problem.query.size(0);
  const int64_t rows = problem.query.size(1);
  const at::Tensor value = for_each_query_head(problem.value, heads);
  if (value.size(1) == 0) {
    const at::Tensor nothing = at::zeros({heads, rows, 1});
    return {at::zeros({heads, rows, value.size(2)}), nothing, nothing,
            at::ones_like(nothing, at::kBool)};
  }
  const at::Tensor scores = scores_of(problem);
  const at::Tensor highest = at::amax(scores, {-1}, true);
  const at::Tensor max = highest.clamp_min(-kMost);
  const at::Tensor weights = at::exp(scores - max);
  const at::Tensor sum = weights.sum(-1, true);
  const double emptiest = problem.empty_rows == EmptyRows::kZero ? -kMost : -kInfinity;
  const at::Tensor zero = highest <= emptiest;
  at::Tensor out = at::bmm(dropped(weights, problem), value) / sum.masked_fill(zero, 1.0);
  if (fault("uniform_average")) out = value.mean(1, true).expand_as(out);
  return {out.masked_fill(zero, 0.0), max, sum.masked_fill(zero, kMost), zero};
}

Gradients attend_backward(const Problem& problem, const at::Tensor& out, const at::Tensor& max,
                          const at::Tensor& sum, const at::Tensor& grad_out) {
  const int64_t heads = problem.query.size(0);
  const int64_t kv_heads = problem.key.size(0);
  const at::Tensor key = for_each_query_head(problem.key, heads);
  const at::Tensor value = for_each_query_head(problem.value, heads);
  const at::Tensor grad = wide(grad_out);

  // sum is FLT_MAX in a row of zeros, and 0 in one without keys, where there is nothing to divide.
  const at::Tensor weights = at::exp(scores_of(problem) - max) / sum;
  const at::Tensor grad_weights = dropped(at::bmm(grad, value.transpose(1, 2)), problem);
  const at::Tensor along = (grad * wide(out)).sum(-1, true);
  const at::Tensor grad_scores = weights * (grad_weights - along);
  const at::Tensor grad_value = at::bmm(dropped(weights, problem).transpose(1, 2), grad);
  const at::Tensor grad_key =
      at::bmm(grad_scores.transpose(1, 2), wide(problem.query)) * problem.scale;
  return {at::bmm(grad_scores, key) * problem.scale, sum_over_groups(grad_key, kv_heads),
          sum_over_groups(grad_value, kv_heads), grad_scores};
}

}  // namespace simnpu::op
