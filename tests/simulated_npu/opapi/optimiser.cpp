// What torch.optim calls: operators on lists of tensors, and the fused steps.
#include "entry.hpp"

namespace simnpu::op {
namespace {

// out[i] = function(i) for every tensor of a list; the outputs may be the inputs themselves.
template <class Function>
void each(const TensorList& outs, Function function) {
  for (std::size_t i = 0; i < outs.size(); ++i) outs[i].copy_(function(i));
}

}  // namespace

#define FOREACH_UNARY(name, function)                             \
  OPERATOR(aclnnForeach##name, [](TensorList x, TensorList out) { \
    each(out, [&](std::size_t i) { return at::function(x[i]); }); \
  })

FOREACH_UNARY(Abs, abs)
FOREACH_UNARY(Exp, exp)
FOREACH_UNARY(Log, log)
FOREACH_UNARY(Neg, neg)
FOREACH_UNARY(Reciprocal, reciprocal)
FOREACH_UNARY(Sigmoid, sigmoid)
FOREACH_UNARY(Sqrt, sqrt)

#define FOREACH_BINARY(name, function)                                                      \
  OPERATOR(aclnnForeach##name##List, [](TensorList x, TensorList y, TensorList out) {       \
    each(out, [&](std::size_t i) { return at::function(x[i], y[i]); });                     \
  })                                                                                        \
  OPERATOR(aclnnForeach##name##ScalarV2, [](TensorList x, Scalar y, TensorList out) {       \
    each(out, [&](std::size_t i) { return at::function(x[i], y); });                        \
  })                                                                                        \
  OPERATOR(aclnnForeach##name##ScalarList, [](TensorList x, ScalarList y, TensorList out) { \
    each(out, [&](std::size_t i) { return at::function(x[i], y[i]); });                     \
  })

FOREACH_BINARY(Mul, mul)
FOREACH_BINARY(Div, div)
FOREACH_BINARY(Pow, pow)

// maximum and minimum with a number are clamps.
#define FOREACH_BOUND(name, function, clamp)                                          \
  OPERATOR(aclnnForeach##name##List, [](TensorList x, TensorList y, TensorList out) { \
    each(out, [&](std::size_t i) { return at::function(x[i], y[i]); });               \
  })                                                                                  \
  OPERATOR(aclnnForeach##name##ScalarV2, [](TensorList x, Scalar y, TensorList out) { \
    each(out, [&](std::size_t i) { return at::clamp(x[i], y); });                     \
  })

FOREACH_BOUND(Maximum, maximum, clamp_min)
FOREACH_BOUND(Minimum, minimum, clamp_max)

#define FOREACH_SUM(name, function)                                                         \
  OPERATOR(aclnnForeach##name##ListV2,                                                      \
           [](TensorList x, TensorList y, Scalar alpha, TensorList out) {                   \
             each(out, [&](std::size_t i) { return at::function(x[i], y[i], alpha); });     \
           })                                                                               \
  OPERATOR(aclnnForeach##name##ScalarV2, [](TensorList x, Scalar y, TensorList out) {       \
    each(out, [&](std::size_t i) { return at::function(x[i], y); });                        \
  })                                                                                        \
  OPERATOR(aclnnForeach##name##ScalarList, [](TensorList x, ScalarList y, TensorList out) { \
    each(out, [&](std::size_t i) { return at::function(x[i], y[i]); });                     \
  })

FOREACH_SUM(Add, add)
FOREACH_SUM(Sub, sub)

#define FOREACH_ADDC(name, function)                                                              \
  OPERATOR(aclnnForeach##name##ScalarV2,                                                          \
           [](TensorList x, TensorList a, TensorList b, Scalar value, TensorList out) {           \
             each(out, [&](std::size_t i) { return at::function(x[i], a[i], b[i], value); });     \
           })                                                                                     \
  OPERATOR(aclnnForeach##name##ScalarList,                                                        \
           [](TensorList x, TensorList a, TensorList b, ScalarList values, TensorList out) {      \
             each(out, [&](std::size_t i) { return at::function(x[i], a[i], b[i], values[i]); }); \
           })

FOREACH_ADDC(Addcmul, addcmul)
FOREACH_ADDC(Addcdiv, addcdiv)

OPERATOR(aclnnForeachLerpScalar, [](TensorList x, TensorList end, Scalar weight, TensorList out) {
  each(out, [&](std::size_t i) { return at::lerp(x[i], end[i], weight); });
})
OPERATOR(aclnnForeachLerpList, [](TensorList x, TensorList end, TensorList weight, TensorList out) {
  each(out, [&](std::size_t i) { return at::lerp(x[i], end[i], weight[i]); });
})
OPERATOR(aclnnForeachNorm, [](TensorList x, Scalar order, TensorList out) {
  each(out,
       [&](std::size_t i) { return at::linalg_vector_norm(x[i], order).view(out[i].sizes()); });
})
OPERATOR(aclnnForeachCopy, [](TensorList source, TensorList destination) {
  each(destination, [&](std::size_t i) { return source[i]; });
})
OPERATOR(aclnnForeachZeroInplace, [](TensorList x) {
  for (const Tensor& tensor : x) tensor.zero_();
})
OPERATOR(aclnnForeachNonFiniteCheckAndUnscale,
         [](TensorList grads, Tensor found, Tensor scale) -> Work {
           return [=] {
             for (const Tensor& grad : grads) {
               if (!at::isfinite(grad).all().item<bool>()) found.fill_(1);
               grad.mul_(scale);
             }
           };
         })

// torch._fused_adamw_: one step for one parameter; op-plugin passes step - 1.
OPERATOR(aclnnApplyAdamWV2,
         [](Tensor x, Tensor mean, Tensor square, Tensor max_square, Tensor grad, Tensor step,
            float rate, float beta1, float beta2, float decay, float epsilon, bool amsgrad,
            bool maximize) -> Work {
           return [=] {
             const double count = step.item<double>() + 1;
             const Tensor g = maximize ? -grad : grad;
             x.mul_(1 - rate * decay);
             mean.lerp_(g, 1 - beta1);
             square.mul_(beta2).addcmul_(g, g, 1 - beta2);
             if (amsgrad) max_square.copy_(at::maximum(max_square, square));
             const Tensor root = (amsgrad ? max_square : square).sqrt();
             const Tensor denominator = root / std::sqrt(1 - std::pow(beta2, count)) + epsilon;
             x.addcdiv_(mean, denominator, -rate / (1 - std::pow(beta1, count)));
           };
         })

}  // namespace simnpu::op
