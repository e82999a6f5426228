// Operators that work element by element, in their plain and their in-place form.
#include "entry.hpp"

namespace simnpu::op {

#define UNARY(name, function)                                             \
  OPERATOR(aclnn##name, [](Tensor x, Out out) { out = at::function(x); }) \
  OPERATOR(aclnnInplace##name, [](Tensor x) { x.copy_(at::function(x)); })

UNARY(Abs, abs)
UNARY(Atan, atan)
UNARY(BitwiseNot, bitwise_not)
UNARY(Ceil, ceil)
UNARY(Cos, cos)
UNARY(Erf, erf)
UNARY(Exp, exp)
UNARY(Exp2, exp2)
UNARY(Expm1, expm1)
UNARY(Floor, floor)
UNARY(Log, log)
UNARY(Log10, log10)
UNARY(Log1p, log1p)
UNARY(Log2, log2)
UNARY(Neg, neg)
UNARY(Reciprocal, reciprocal)
UNARY(Relu, relu)
UNARY(Round, round)
UNARY(Rsqrt, rsqrt)
UNARY(Sigmoid, sigmoid)
UNARY(Sign, sign)
UNARY(Sin, sin)
UNARY(Sqrt, sqrt)
UNARY(Tanh, tanh)
UNARY(Trunc, trunc)

OPERATOR(aclnnAdd, [](Tensor x, Tensor y, Scalar alpha, Out out) { out = at::add(x, y, alpha); })
OPERATOR(aclnnAdds, [](Tensor x, Scalar y, Scalar alpha, Out out) { out = at::add(x, y, alpha); })
OPERATOR(aclnnAddV3, [](Scalar x, Tensor y, Scalar alpha, Out out) {
  out = at::add(at::scalar_tensor(x, out.view().options()), y, alpha);
})
OPERATOR(aclnnInplaceAdd, [](Tensor x, Tensor y, Scalar alpha) { x.add_(y, alpha); })
OPERATOR(aclnnInplaceAdds, [](Tensor x, Scalar y, Scalar alpha) { x.add_(y, alpha); })

OPERATOR(aclnnSub, [](Tensor x, Tensor y, Scalar alpha, Out out) { out = at::sub(x, y, alpha); })
OPERATOR(aclnnSubs, [](Tensor x, Scalar y, Scalar alpha, Out out) { out = at::sub(x, y, alpha); })
OPERATOR(aclnnInplaceSub, [](Tensor x, Tensor y, Scalar alpha) { x.sub_(y, alpha); })
OPERATOR(aclnnInplaceSubs, [](Tensor x, Scalar y, Scalar alpha) { x.sub_(y, alpha); })
OPERATOR(aclnnRsub, [](Tensor x, Tensor y, Scalar alpha, Out out) { out = at::rsub(x, y, alpha); })
OPERATOR(aclnnRsubs, [](Tensor x, Scalar y, Scalar alpha, Out out) { out = at::rsub(x, y, alpha); })

OPERATOR(aclnnMul, [](Tensor x, Tensor y, Out out) { out = at::mul(x, y); })
OPERATOR(aclnnMuls, [](Tensor x, Scalar y, Out out) { out = at::mul(x, y); })
OPERATOR(aclnnInplaceMul, [](Tensor x, Tensor y) { x.mul_(y); })
OPERATOR(aclnnInplaceMuls, [](Tensor x, Scalar y) { x.mul_(y); })

OPERATOR(aclnnDiv, [](Tensor x, Tensor y, Out out) { out = at::div(x, y); })
OPERATOR(aclnnDivs, [](Tensor x, Scalar y, Out out) { out = at::div(x, y); })
OPERATOR(aclnnInplaceDiv, [](Tensor x, Tensor y) { x.div_(y); })
OPERATOR(aclnnInplaceDivs, [](Tensor x, Scalar y) { x.div_(y); })
OPERATOR(aclnnFloorDivide, [](Tensor x, Tensor y, Out out) { out = at::floor_divide(x, y); })
OPERATOR(aclnnFloorDivides, [](Tensor x, Scalar y, Out out) { out = at::floor_divide(x, y); })
OPERATOR(aclnnInplaceFloorDivide, [](Tensor x, Tensor y) { x.floor_divide_(y); })
OPERATOR(aclnnInplaceFloorDivides, [](Tensor x, Scalar y) { x.floor_divide_(y); })

// op-plugin's rounding modes: 0 none, 1 trunc, 2 floor.
std::optional<c10::string_view> rounding(int64_t mode) {
  if (mode == 0) return std::nullopt;
  return mode == 1 ? "trunc" : "floor";
}
OPERATOR(aclnnDivMod,
         [](Tensor x, Tensor y, int64_t mode, Out out) { out = at::div(x, y, rounding(mode)); })
OPERATOR(aclnnDivMods,
         [](Tensor x, Scalar y, int64_t mode, Out out) { out = at::div(x, y, rounding(mode)); })

OPERATOR(aclnnRemainderTensorTensor, [](Tensor x, Tensor y, Out out) { out = at::remainder(x, y); })
OPERATOR(aclnnRemainderTensorScalar, [](Tensor x, Scalar y, Out out) { out = at::remainder(x, y); })

OPERATOR(aclnnPowTensorScalar, [](Tensor x, Scalar y, Out out) { out = at::pow(x, y); })
OPERATOR(aclnnPowTensorTensor, [](Tensor x, Tensor y, Out out) { out = at::pow(x, y); })
OPERATOR(aclnnPowScalarTensor, [](Scalar x, Tensor y, Out out) { out = at::pow(x, y); })
OPERATOR(aclnnInplacePowTensorScalar, [](Tensor x, Scalar y) { x.pow_(y); })
OPERATOR(aclnnInplacePowTensorTensor, [](Tensor x, Tensor y) { x.pow_(y); })

OPERATOR(aclnnMaximum, [](Tensor x, Tensor y, Out out) { out = at::maximum(x, y); })
OPERATOR(aclnnMinimum, [](Tensor x, Tensor y, Out out) { out = at::minimum(x, y); })
OPERATOR(aclnnLogAddExp, [](Tensor x, Tensor y, Out out) { out = at::logaddexp(x, y); })
OPERATOR(aclnnClamp, [](Tensor x, MaybeScalar low, MaybeScalar high, Out out) {
  out = at::clamp(x, low, high);
})
OPERATOR(aclnnClampMin, [](Tensor x, Scalar low, Out out) { out = at::clamp_min(x, low); })
OPERATOR(aclnnClampMax, [](Tensor x, Scalar high, Out out) { out = at::clamp_max(x, high); })
OPERATOR(aclnnClampMinTensor, [](Tensor x, Tensor low, Out out) { out = at::clamp_min(x, low); })
OPERATOR(aclnnClampMaxTensor, [](Tensor x, Tensor high, Out out) { out = at::clamp_max(x, high); })
OPERATOR(aclnnInplaceClampMinTensor, [](Tensor x, Tensor low) { x.clamp_min_(low); })
OPERATOR(aclnnInplaceClampMax, [](Tensor x, Scalar high) { x.clamp_max_(high); })

OPERATOR(aclnnAddcmul, [](Tensor x, Tensor a, Tensor b, Scalar value, Out out) {
  out = at::addcmul(x, a, b, value);
})
OPERATOR(aclnnAddcdiv, [](Tensor x, Tensor a, Tensor b, Scalar value, Out out) {
  out = at::addcdiv(x, a, b, value);
})
OPERATOR(aclnnInplaceAddcmul,
         [](Tensor x, Tensor a, Tensor b, Scalar value) { x.addcmul_(a, b, value); })
OPERATOR(aclnnInplaceAddcdiv,
         [](Tensor x, Tensor a, Tensor b, Scalar value) { x.addcdiv_(a, b, value); })
OPERATOR(aclnnLerp, [](Tensor x, Tensor end, Tensor w, Out out) { out = at::lerp(x, end, w); })
OPERATOR(aclnnLerps, [](Tensor x, Tensor end, Scalar w, Out out) { out = at::lerp(x, end, w); })
OPERATOR(aclnnInplaceLerp, [](Tensor x, Tensor end, Tensor w) { x.lerp_(end, w); })
OPERATOR(aclnnInplaceLerps, [](Tensor x, Tensor end, Scalar w) { x.lerp_(end, w); })

}  // namespace simnpu::op
