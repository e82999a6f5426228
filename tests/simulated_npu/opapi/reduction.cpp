// Reductions, prefix sums and orderings.
#include "entry.hpp"

namespace simnpu::op {

using Dims = at::OptionalIntArrayRef;

OPERATOR(aclnnReduceSum, [](Tensor x, IntArray dims, bool keep, at::ScalarType type, Out out) {
  out = at::sum(x, Dims(dims), keep, type);
})
OPERATOR(aclnnMean, [](Tensor x, IntArray dims, bool keep, at::ScalarType type, Out out) {
  out = at::mean(x, Dims(dims), keep, type);
})
OPERATOR(aclnnProd, [](Tensor x, at::ScalarType type, Out out) { out = at::prod(x, type); })
OPERATOR(aclnnProdDim, [](Tensor x, int64_t dim, bool keep, at::ScalarType type, Out out) {
  out = at::prod(x, dim, keep, type);
})
OPERATOR(aclnnAmax,
         [](Tensor x, IntArray dims, bool keep, Out out) { out = at::amax(x, dims, keep); })
OPERATOR(aclnnAmin,
         [](Tensor x, IntArray dims, bool keep, Out out) { out = at::amin(x, dims, keep); })
OPERATOR(aclnnMax, [](Tensor x, Out out) { out = at::max(x); })
OPERATOR(aclnnMin, [](Tensor x, Out out) { out = at::min(x); })
OPERATOR(aclnnMaxDim, [](Tensor x, int64_t dim, bool keep, Out values, Out indices) {
  const auto [value, index] = at::max(x, dim, keep);
  values = value;
  indices = index;
})
OPERATOR(aclnnMinDim, [](Tensor x, int64_t dim, bool keep, Out values, Out indices) {
  const auto [value, index] = at::min(x, dim, keep);
  values = value;
  indices = index;
})
OPERATOR(aclnnArgMax,
         [](Tensor x, int64_t dim, bool keep, Out out) { out = at::argmax(x, dim, keep); })
OPERATOR(aclnnArgMin,
         [](Tensor x, int64_t dim, bool keep, Out out) { out = at::argmin(x, dim, keep); })

// An empty list of dims means all of them.
OPERATOR(aclnnAll, [](Tensor x, IntArray dims, bool keep, Out out) {
  const Tensor truth = x.to(at::kBool);
  out = dims.empty() ? at::all(truth) : at::all(truth, Dims(dims), keep);
})
OPERATOR(aclnnAny, [](Tensor x, IntArray dims, bool keep, Out out) {
  const Tensor truth = x.to(at::kBool);
  out = dims.empty() ? at::any(truth) : at::any(truth, Dims(dims), keep);
})

OPERATOR(aclnnLogSumExp,
         [](Tensor x, IntArray dims, bool keep, Out out) { out = at::logsumexp(x, dims, keep); })
OPERATOR(aclnnLinalgVectorNorm,
         [](Tensor x, Scalar order, IntArray dims, bool keep, at::ScalarType type, Out out) {
           const Dims over = dims.empty() ? Dims() : Dims(dims);
           out = at::linalg_vector_norm(x, order, over, keep, type);
         })
OPERATOR(aclnnNorm, [](Tensor x, Scalar p, IntArray dims, bool keep, Out out) {
  out = at::norm(x, p, dims, keep);
})
OPERATOR(aclnnVarCorrection, [](Tensor x, IntArray dims, int64_t correction, bool keep, Out out) {
  out = at::var(x, Dims(dims), Scalar(correction), keep);
})
OPERATOR(aclnnStd, [](Tensor x, IntArray dims, int64_t correction, bool keep, Out out) {
  out = at::std(x, Dims(dims), Scalar(correction), keep);
})
OPERATOR(aclnnVarMean,
         [](Tensor x, IntArray dims, int64_t correction, bool keep, Out var, Out mean) {
           const auto [variance, average] = at::var_mean(x, Dims(dims), Scalar(correction), keep);
           var = variance;
           mean = average;
         })

OPERATOR(aclnnCumsum, [](Tensor x, int64_t dim, at::ScalarType type, Out out) {
  out = at::cumsum(x, dim, type);
})
OPERATOR(aclnnSort, [](Tensor x, bool stable, int64_t dim, bool down, Out values, Out indices) {
  const auto [value, index] = at::sort(x, stable, dim, down);
  values = value;
  indices = index;
})
OPERATOR(aclnnTopk,
         [](Tensor x, int64_t k, int64_t dim, bool largest, bool sorted, Out values, Out indices) {
           const auto [value, index] = at::topk(x, k, dim, largest, sorted);
           values = value;
           indices = index;
         })

}  // namespace simnpu::op
