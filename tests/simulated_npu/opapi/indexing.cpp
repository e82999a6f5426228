// Reads and writes at computed places.
#include "entry.hpp"

namespace simnpu::op {
namespace {

// op-plugin pads the list of indices with empty tensors where a dimension is taken whole.
c10::List<std::optional<Tensor>> optional_indices(const TensorList& indices) {
  c10::List<std::optional<Tensor>> list;
  for (const Tensor& index : indices) {
    const bool whole = !index.defined() || (index.dim() == 1 && index.numel() == 0);
    list.push_back(whole ? std::nullopt : std::optional<Tensor>(index));
  }
  return list;
}

// Reductions of aclnnScatter: 0 none, 1 add, 2 multiply.
void scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source,
             int64_t reduction) {
  if (reduction == 0) {
    x.scatter_(dim, index, source);
  } else {
    x.scatter_(dim, index, source, reduction == 1 ? "add" : "multiply");
  }
}

}  // namespace

OPERATOR(aclnnIndexSelect, [](Tensor x, int64_t dim, Tensor index, Out out) {
  out = at::index_select(x, dim, index);
})
OPERATOR(aclnnGather,
         [](Tensor x, int64_t dim, Tensor index, Out out) { out = at::gather(x, dim, index); })
OPERATOR(aclnnIndex, [](Tensor x, TensorList indices, Out out) -> Work {
  return [=] { out = at::index(x, optional_indices(indices)); };
})
OPERATOR(aclnnIndexPutImpl,
         [](Tensor x, TensorList indices, Tensor values, bool accumulate, bool) -> Work {
           return [=] { Tensor(x).index_put_(optional_indices(indices), values, accumulate); };
         })
OPERATOR(aclnnIndexAdd, [](Tensor x, int64_t dim, Tensor index, Tensor source, Scalar alpha,
                           Out out) { out = at::index_add(x, dim, index, source, alpha); })
OPERATOR(aclnnIndexAddV2,
         [](Tensor x, int64_t dim, Tensor index, Tensor source, Scalar alpha, int64_t, Out out) {
           out = at::index_add(x, dim, index, source, alpha);
         })
OPERATOR(aclnnInplaceIndexCopy, [](Tensor x, int64_t dim, Tensor index, Tensor source) {
  x.index_copy_(dim, index, source);
})
OPERATOR(aclnnScatter,
         [](Tensor x, int64_t dim, Tensor index, Tensor source, int64_t reduction, Out out) {
           const Tensor result = x.clone();
           scatter(result, dim, index, source, reduction);
           out = result;
         })
OPERATOR(aclnnInplaceScatter, [](Tensor x, int64_t dim, Tensor index, Tensor source,
                                 int64_t reduction) { scatter(x, dim, index, source, reduction); })
OPERATOR(aclnnScatterValue, [](Tensor x, int64_t dim, Tensor index, Scalar value, int64_t,
                               Out out) { out = at::scatter(x, dim, index, value); })
OPERATOR(aclnnInplaceScatterValue, [](Tensor x, int64_t dim, Tensor index, Scalar value, int64_t) {
  x.scatter_(dim, index, value);
})
OPERATOR(aclnnScatterAdd, [](Tensor x, int64_t dim, Tensor index, Tensor source, Out out) {
  out = at::scatter_add(x, dim, index, source);
})
OPERATOR(aclnnMaskedSelect, [](Tensor x, Tensor mask, Out out) -> Work {
  return [=] { out.shrink_to(at::masked_select(x, mask)); };
})
OPERATOR(aclnnNonzeroV2, [](Tensor x, Out out) -> Work {
  // The memory is sized for every element; its rows are dimensions, its columns the elements found.
  return [=] { out.shrink_to(at::nonzero(x).t()); };
})
OPERATOR(aclnnNonzero,
         [](Tensor x, Out out) -> Work { return [=] { out.shrink_to(at::nonzero(x)); }; })

OPERATOR(aclnnEmbedding,
         [](Tensor weight, Tensor indices, Out out) { out = at::embedding(weight, indices); })
OPERATOR(aclnnEmbeddingDenseBackward,
         [](Tensor grad, Tensor indices, uint64_t rows, uint64_t padding, bool scale,
            Out out) -> Work {
           return [=] {
             out = at::embedding_dense_backward(grad, indices.to(at::kLong),
                                                static_cast<int64_t>(rows),
                                                static_cast<int64_t>(padding), scale);
           };
         })

}  // namespace simnpu::op
