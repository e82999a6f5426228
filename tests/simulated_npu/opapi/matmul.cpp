// Matrix products. The last argument is cubeMathType, the precision the cube unit may use: ignored
// here, products are those of the CPU in the operands' own type.
#include "entry.hpp"
#include "refusal.hpp"

namespace simnpu::op {
namespace {

// The cube unit has no double precision: aclnnMatmul lists DT_FLOAT, DT_FLOAT16 and DT_BF16.
void check_types(const Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  require_parameter(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                    "Tensor self not implemented for ", data_type_name(type),
                    ", should be in dtype support list [DT_FLOAT,DT_FLOAT16,DT_BF16,].");
}

}  // namespace

OPERATOR(aclnnMatmul, [](Tensor x, Tensor y, Out out, int8_t) {
  check_types(x);
  out = at::matmul(x, y);
})
OPERATOR(aclnnMm, [](Tensor x, Tensor y, Out out, int8_t) {
  check_types(x);
  out = at::mm(x, y);
})
OPERATOR(aclnnBatchMatMul, [](Tensor x, Tensor y, Out out, int8_t) {
  check_types(x);
  out = at::bmm(x, y);
})
OPERATOR(aclnnMv, [](Tensor x, Tensor y, Out out, int8_t) {
  check_types(x);
  out = at::mv(x, y);
})
OPERATOR(aclnnDot, [](Tensor x, Tensor y, Out out) { out = at::dot(x, y); })
OPERATOR(aclnnAddmm,
         [](Tensor bias, Tensor x, Tensor y, Scalar beta, Scalar alpha, Out out, int8_t) {
           check_types(x);
           out = at::addmm(bias, x, y, beta, alpha);
         })
OPERATOR(aclnnInplaceAddmm, [](Tensor bias, Tensor x, Tensor y, Scalar beta, Scalar alpha, int8_t) {
  check_types(x);
  bias.addmm_(x, y, beta, alpha);
})
OPERATOR(aclnnBaddbmm,
         [](Tensor bias, Tensor x, Tensor y, Scalar beta, Scalar alpha, Out out, int8_t) {
           check_types(x);
           out = at::baddbmm(bias, x, y, beta, alpha);
         })

// These must exist, or op-plugin takes the legacy path for every product; private (NZ) formats are
// not modelled, so nothing reaches them.
#define NO_PRIVATE_FORMAT(symbol, ...)                                         \
  OPERATOR(symbol, [](__VA_ARGS__) -> Work {                                   \
    throw Refused(kInvalidParameter, "private (NZ) formats are not modelled"); \
  })

NO_PRIVATE_FORMAT(aclnnMatmulWeightNz, Tensor, Tensor, Out, int8_t)
NO_PRIVATE_FORMAT(aclnnBatchMatMulWeightNz, Tensor, Tensor, Out, int8_t)
NO_PRIVATE_FORMAT(aclnnAddmmWeightNz, Tensor, Tensor, Tensor, Scalar, Scalar, Out, int8_t)

}  // namespace simnpu::op
