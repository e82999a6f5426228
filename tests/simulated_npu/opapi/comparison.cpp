// Comparisons, logic, and choices by a mask.
#include "entry.hpp"

namespace simnpu::op {

#define COMPARISON(name, function)                                                              \
  OPERATOR(aclnn##name##Tensor, [](Tensor x, Tensor y, Out out) { out = at::function(x, y); })  \
  OPERATOR(aclnn##name##Scalar, [](Tensor x, Scalar y, Out out) { out = at::function(x, y); })  \
  OPERATOR(aclnnInplace##name##Tensor, [](Tensor x, Tensor y) { x.copy_(at::function(x, y)); }) \
  OPERATOR(aclnnInplace##name##Scalar, [](Tensor x, Scalar y) { x.copy_(at::function(x, y)); })

COMPARISON(Eq, eq)
COMPARISON(Ne, ne)
COMPARISON(Gt, gt)
COMPARISON(Ge, ge)
COMPARISON(Lt, lt)
COMPARISON(Le, le)
COMPARISON(BitwiseAnd, bitwise_and)
COMPARISON(BitwiseOr, bitwise_or)
COMPARISON(BitwiseXor, bitwise_xor)

OPERATOR(aclnnLogicalNot, [](Tensor x, Out out) { out = at::logical_not(x); })
OPERATOR(aclnnLogicalAnd, [](Tensor x, Tensor y, Out out) { out = at::logical_and(x, y); })
OPERATOR(aclnnLogicalOr, [](Tensor x, Tensor y, Out out) { out = at::logical_or(x, y); })
OPERATOR(aclnnLogicalXor, [](Tensor x, Tensor y, Out out) { out = at::logical_xor(x, y); })
OPERATOR(aclnnInplaceLogicalNot, [](Tensor x) { x.logical_not_(); })
OPERATOR(aclnnInplaceLogicalAnd, [](Tensor x, Tensor y) { x.logical_and_(y); })
OPERATOR(aclnnInplaceLogicalOr, [](Tensor x, Tensor y) { x.logical_or_(y); })

OPERATOR(aclnnIsFinite, [](Tensor x, Out out) { out = at::isfinite(x); })
OPERATOR(aclnnIsPosInf, [](Tensor x, Out out) { out = at::isposinf(x); })
OPERATOR(aclnnIsNegInf, [](Tensor x, Out out) { out = at::isneginf(x); })
OPERATOR(aclnnIsClose, [](Tensor x, Tensor y, double rtol, double atol, bool equal_nan, Out out) {
  out = at::isclose(x, y, rtol, atol, equal_nan);
})
OPERATOR(aclnnEqual, [](Tensor x, Tensor y, Out out) -> Work {
  return [=] { out.view().fill_(at::equal(x, y)); };
})

OPERATOR(aclnnSWhere,
         [](Tensor condition, Tensor x, Tensor y, Out out) { out = at::where(condition, x, y); })
OPERATOR(aclnnInplaceMaskedFillScalar,
         [](Tensor x, Tensor mask, Scalar value) { x.masked_fill_(mask, value); })
OPERATOR(aclnnInplaceMaskedFillTensor,
         [](Tensor x, Tensor mask, Tensor value) { x.masked_fill_(mask, value); })
OPERATOR(aclnnNanToNum, [](Tensor x, float nan, float positive, float negative, Out out) {
  out = at::nan_to_num(x, nan, positive, negative);
})

}  // namespace simnpu::op
