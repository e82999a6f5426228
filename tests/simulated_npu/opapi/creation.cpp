// Operators that fill new memory, and triangular parts.
#include "entry.hpp"

namespace simnpu::op {

OPERATOR(aclnnInplaceZero, [](Tensor x) { x.zero_(); })
OPERATOR(aclnnInplaceOne, [](Tensor x) { x.fill_(1); })
OPERATOR(aclnnInplaceFillScalar, [](Tensor x, Scalar value) { x.fill_(value); })
OPERATOR(aclnnInplaceFillTensor, [](Tensor x, Tensor value) { x.fill_(value); })
OPERATOR(aclnnInplaceFillDiagonal,
         [](Tensor x, Scalar value, bool wrap) { x.fill_diagonal_(value, wrap); })

OPERATOR(aclnnArange, [](Scalar start, Scalar end, Scalar step, Out out) {
  out = at::arange(start, end, step, out.view().options());
})
OPERATOR(aclnnRange, [](Scalar start, Scalar end, Scalar step, Out out) {
  out = at::range(start, end, step, out.view().options());
})
OPERATOR(aclnnLinspace, [](Scalar start, Scalar end, int64_t steps, Out out) {
  out = at::linspace(start, end, steps, out.view().options());
})
OPERATOR(aclnnEye, [](int64_t rows, int64_t columns, Out out) {
  out = at::eye(rows, columns, out.view().options());
})
OPERATOR(aclnnOneHot, [](Tensor x, int64_t depth, Tensor on, Tensor off, int64_t axis, Out out) {
  const Tensor hot = at::eq(x.unsqueeze(axis), at::arange(depth, x.options()));
  out = at::where(hot, on, off);
})

OPERATOR(aclnnTriu, [](Tensor x, int64_t diagonal, Out out) { out = at::triu(x, diagonal); })
OPERATOR(aclnnTril, [](Tensor x, int64_t diagonal, Out out) { out = at::tril(x, diagonal); })
OPERATOR(aclnnInplaceTriu, [](Tensor x, int64_t diagonal) { x.triu_(diagonal); })
OPERATOR(aclnnInplaceTril, [](Tensor x, int64_t diagonal) { x.tril_(diagonal); })

}  // namespace simnpu::op
