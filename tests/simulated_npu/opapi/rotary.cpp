// npu_rotary_mul: x * cos + rotate(x) * sin, and its gradient.
#include <ATen/ExpandUtils.h>

#include "entry.hpp"

namespace simnpu::op {
namespace {

// Mode 0 rotates halves, (a, b) -> (-b, a); mode 1 neighbours, (a0, b0, ...) -> (-b0, a0, ...).
Tensor rotate(const Tensor& x, int64_t mode) {
  if (mode == 0) {
    const TensorList halves = at::chunk(x, 2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  const Tensor pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

}  // namespace

OPERATOR(aclnnRotaryPositionEmbedding, [](Tensor x, Tensor cos, Tensor sin, int64_t mode, Out out) {
  out = x * cos + rotate(x, mode) * sin;
})
OPERATOR(aclnnRotaryPositionEmbeddingGrad,
         [](Tensor grad, Tensor cos, Tensor sin, Tensor x, int64_t mode, Out grad_x, Out grad_cos,
            Out grad_sin) {
           grad_x = grad * cos - rotate(grad * sin, mode);
           if (!x.defined()) return;  // cos and sin need no gradient
           grad_cos = at::sum_to(grad * x, cos.sizes());
           grad_sin = at::sum_to(grad * rotate(x, mode), sin.sizes());
         })

}  // namespace simnpu::op
