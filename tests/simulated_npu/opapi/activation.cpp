// Activations and their gradients.
#include "entry.hpp"

namespace simnpu::op {

OPERATOR(aclnnSilu, [](Tensor x, Out out) { out = at::silu(x); })
OPERATOR(aclnnSiluBackward,
         [](Tensor grad, Tensor x, Out out) { out = at::silu_backward(grad, x); })

// Without TORCH_NPU_USE_COMPATIBLE_IMPL torch_npu drops `approximate` and calls the V1 entries, and
// CANN's Gelu has one formula, the tanh one (hicann/ops-nn, activation/gelu/README.md). So
// F.gelu(x) on a device is F.gelu(x, approximate="tanh"), up to 5e-4 from the exact form.
OPERATOR(aclnnGelu, [](Tensor x, Out out) { out = at::gelu(x, "tanh"); })
OPERATOR(aclnnGeluBackward,
         [](Tensor grad, Tensor x, Out out) { out = at::gelu_backward(grad, x, "tanh"); })
OPERATOR(aclnnGeluV2,
         [](Tensor x, int64_t tanh, Out out) { out = at::gelu(x, tanh ? "tanh" : "none"); })
OPERATOR(aclnnGeluBackwardV2, [](Tensor grad, Tensor x, std::string approximate, Out out) {
  out = at::gelu_backward(grad, x, approximate);
})

OPERATOR(aclnnSigmoidBackward,
         [](Tensor grad, Tensor y, Out out) { out = at::sigmoid_backward(grad, y); })
OPERATOR(aclnnTanhBackward,
         [](Tensor grad, Tensor y, Out out) { out = at::tanh_backward(grad, y); })
OPERATOR(aclnnThresholdBackward, [](Tensor grad, Tensor x, Scalar threshold, Out out) {
  out = at::threshold_backward(grad, x, threshold);
})
OPERATOR(aclnnLeakyRelu, [](Tensor x, Scalar slope, Out out) { out = at::leaky_relu(x, slope); })
OPERATOR(aclnnLeakyReluBackward, [](Tensor grad, Tensor x, Scalar slope, bool of_result, Out out) {
  out = at::leaky_relu_backward(grad, x, slope, of_result);
})
OPERATOR(aclnnSoftplus, [](Tensor x, Scalar beta, Scalar threshold, Out out) {
  out = at::softplus(x, beta, threshold);
})
OPERATOR(aclnnSoftplusBackward, [](Tensor grad, Tensor x, Scalar beta, Scalar threshold, Out out) {
  out = at::softplus_backward(grad, x, beta, threshold);
})

// npu_swiglu(x): silu(first half) * second half.
OPERATOR(aclnnSwiGlu, [](Tensor x, int64_t dim, Out out) {
  const TensorList halves = at::chunk(x, 2, dim);
  out = at::silu(halves[0]) * halves[1];
})
OPERATOR(aclnnSwiGluGrad, [](Tensor grad, Tensor x, int64_t dim, Out out) {
  const TensorList halves = at::chunk(x, 2, dim);
  out = at::cat({at::silu_backward(grad * halves[1], halves[0]), grad * at::silu(halves[0])}, dim);
})

}  // namespace simnpu::op
