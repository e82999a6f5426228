// Losses and their gradients. Reductions are torch's: 0 none, 1 mean, 2 sum.
#include "entry.hpp"

namespace simnpu::op {

OPERATOR(aclnnNLLLoss, [](Tensor x, Tensor target, Tensor weight, int64_t reduction, int64_t ignore,
                          Out out, Out total) {
  const auto [loss, weights] =
      at::nll_loss_forward(x, target.to(at::kLong), weight, reduction, ignore);
  out = loss;
  total = weights.view(total.view().sizes());
})
OPERATOR(aclnnNLLLossBackward, [](Tensor grad, Tensor x, Tensor target, Tensor weight,
                                  int64_t reduction, int64_t ignore, Tensor total, Out out) {
  out = at::nll_loss_backward(grad, x, target.to(at::kLong), weight, reduction, ignore,
                              total.view(at::IntArrayRef{}));
})
OPERATOR(aclnnMseLoss, [](Tensor x, Tensor target, int64_t reduction, Out out) {
  out = at::mse_loss(x, target, reduction);
})
OPERATOR(aclnnMseLossBackward,
         [](Tensor grad, Tensor x, Tensor target, int64_t reduction, Out out) {
           out = at::mse_loss_backward(grad, x, target, reduction);
         })
OPERATOR(aclnnSmoothL1Loss, [](Tensor x, Tensor target, int64_t reduction, float beta, Out out) {
  out = at::smooth_l1_loss(x, target, reduction, beta);
})
OPERATOR(aclnnSmoothL1LossBackward,
         [](Tensor grad, Tensor x, Tensor target, int64_t reduction, float beta, Out out) {
           out = at::smooth_l1_loss_backward(grad, x, target, reduction, beta);
         })

}  // namespace simnpu::op
