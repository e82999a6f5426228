// Convolutions, for the patch embeddings of vision models. Sizes come as ATen takes them.
#include "entry.hpp"

namespace simnpu::op {

OPERATOR(aclnnConvolution, [](Tensor x, Tensor weight, Tensor bias, IntArray stride,
                              IntArray padding, IntArray dilation, bool transposed,
                              IntArray output_padding, int64_t groups, Out out, int8_t) {
  out = at::convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding,
                        groups);
})
OPERATOR(aclnnConvolutionBackward,
         [](Tensor grad, Tensor x, Tensor weight, IntArray bias_sizes, IntArray stride,
            IntArray padding, IntArray dilation, bool transposed, IntArray output_padding,
            int64_t groups, BoolArray mask, int8_t, Out grad_x, Out grad_weight, Out grad_bias) {
           const std::array<bool, 3> wanted = {mask[0] != 0, mask[1] != 0, mask[2] != 0};
           const at::OptionalIntArrayRef sizes =
               bias_sizes.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(bias_sizes);
           const auto [dx, dweight, dbias] =
               at::convolution_backward(grad, x, weight, sizes, stride, padding, dilation,
                                        transposed, output_padding, groups, wanted);
           if (wanted[0]) grad_x = dx;
           if (wanted[1]) grad_weight = dweight;
           if (wanted[2]) grad_bias = dbias;
         })

}  // namespace simnpu::op
