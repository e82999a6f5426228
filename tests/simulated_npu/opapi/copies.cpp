// Copies, casts, and moves of whole slices.
#include "entry.hpp"

namespace simnpu::op {

OPERATOR(aclnnInplaceCopy, [](Tensor destination, Tensor source) { destination.copy_(source); })
OPERATOR(aclnnCast, [](Tensor x, at::ScalarType, Out out) { out = x; })

OPERATOR(aclnnCat, [](TensorList parts, int64_t dim, Out out) { out = at::cat(parts, dim); })
OPERATOR(aclnnStack, [](TensorList parts, int64_t dim, Out out) { out = at::stack(parts, dim); })
OPERATOR(aclnnSplitWithSize, [](Tensor x, IntArray sizes, int64_t dim, TensorList parts) {
  const TensorList pieces = at::split_with_sizes(x, sizes, dim);
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i].copy_(pieces[i]);
})

OPERATOR(aclnnConstantPadNd, [](Tensor x, IntArray padding, Scalar value, Out out) {
  out = at::constant_pad_nd(x, padding, value);
})
OPERATOR(aclnnRepeat, [](Tensor x, IntArray times, Out out) { out = x.repeat(times); })
OPERATOR(aclnnRepeatInterleaveInt,
         [](Tensor x, int64_t times, int64_t, Out out) { out = at::repeat_interleave(x, times); })
OPERATOR(aclnnRepeatInterleaveIntWithDim,
         [](Tensor x, int64_t times, int64_t dim, int64_t, Out out) {
           out = at::repeat_interleave(x, times, dim);
         })
OPERATOR(aclnnFlip, [](Tensor x, IntArray dims, Out out) { out = at::flip(x, dims); })
OPERATOR(aclnnRoll,
         [](Tensor x, IntArray shifts, IntArray dims, Out out) { out = at::roll(x, shifts, dims); })

}  // namespace simnpu::op
