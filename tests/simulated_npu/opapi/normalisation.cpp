// Softmax, layer norm and RMS norm, with their gradients.
#include "entry.hpp"

namespace simnpu::op {
namespace {

// The last dims of x that an operand of `num_dims` dimensions covers.
IntArray trailing_dims(int64_t num_dims) {
  IntArray dims;
  for (int64_t dim = 1; dim <= num_dims; ++dim) dims.push_back(-dim);
  return dims;
}

// x / sqrt(mean(x^2) + epsilon) over the dims of gamma, and the reciprocal root, both float32.
std::pair<Tensor, Tensor> rms_normalised(const Tensor& x, const Tensor& gamma, double epsilon) {
  const Tensor wide = x.to(at::kFloat);
  const IntArray dims = trailing_dims(gamma.dim());
  const Tensor rstd =
      at::rsqrt(at::mean(wide * wide, at::OptionalIntArrayRef(dims), true) + epsilon);
  return {wide * rstd, rstd};
}

}  // namespace

OPERATOR(aclnnSoftmax, [](Tensor x, int64_t dim, Out out) {
  out = at::softmax(x, dim, out.view().scalar_type());
})
OPERATOR(aclnnSoftmaxBackward, [](Tensor grad, Tensor y, int64_t dim, Out out) {
  out = at::_softmax_backward_data(grad, y, dim, grad.scalar_type());
})
OPERATOR(aclnnLogSoftmax, [](Tensor x, int64_t dim, Out out) {
  out = at::log_softmax(x, dim, out.view().scalar_type());
})
OPERATOR(aclnnLogSoftmaxBackward, [](Tensor grad, Tensor y, int64_t dim, Out out) {
  out = at::_log_softmax_backward_data(grad, y, dim, grad.scalar_type());
})

OPERATOR(aclnnLayerNorm, [](Tensor x, IntArray shape, Tensor weight, Tensor bias, double epsilon,
                            Out y, Out mean, Out rstd) {
  const auto [normed, mean_of, rstd_of] = at::native_layer_norm(x, shape, weight, bias, epsilon);
  y = normed;
  if (mean.wanted()) mean = mean_of.view(mean.view().sizes());
  if (rstd.wanted()) rstd = rstd_of.view(rstd.view().sizes());
})
OPERATOR(aclnnLayerNormBackward, [](Tensor grad, Tensor x, IntArray shape, Tensor mean, Tensor rstd,
                                    Tensor weight, Tensor bias, BoolArray mask, Out grad_x,
                                    Out grad_weight, Out grad_bias) {
  const std::array<bool, 3> wanted = {mask[0] != 0, mask[1] != 0, mask[2] != 0};
  const auto [dx, dweight, dbias] = at::native_layer_norm_backward(
      grad, x, shape, mean.to(x.scalar_type()), rstd.to(x.scalar_type()), weight, bias, wanted);
  if (wanted[0]) grad_x = dx;
  if (wanted[1]) grad_weight = dweight;
  if (wanted[2]) grad_bias = dbias;
})

OPERATOR(aclnnRmsNorm, [](Tensor x, Tensor gamma, double epsilon, Out y, Out rstd) {
  const auto [normed, reciprocal] = rms_normalised(x, gamma, epsilon);
  y = normed * gamma.to(at::kFloat);
  if (rstd.wanted()) rstd = reciprocal.view(rstd.view().sizes());
})
OPERATOR(aclnnRmsNormGrad, [](Tensor dy, Tensor x, Tensor rstd, Tensor gamma, Out dx, Out dgamma) {
  const IntArray dims = trailing_dims(gamma.dim());
  const Tensor reciprocal = rstd.to(at::kFloat);
  const Tensor normed = x.to(at::kFloat) * reciprocal;
  const Tensor grad = dy.to(at::kFloat) * gamma.to(at::kFloat);
  const Tensor along = at::mean(grad * normed, at::OptionalIntArrayRef(dims), true);
  dx = (grad - normed * along) * reciprocal;
  Tensor sum = dy.to(at::kFloat) * normed;
  if (x.dim() > gamma.dim()) sum = sum.flatten(0, x.dim() - gamma.dim() - 1).sum(0);
  dgamma = sum;
})

}  // namespace simnpu::op
