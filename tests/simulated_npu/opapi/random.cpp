#include "random.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/PhiloxRNGEngine.h>

#include "entry.hpp"

namespace simnpu::op {

at::Generator generator_for(int64_t seed, int64_t offset) {
  at::Philox4_32 engine(static_cast<uint64_t>(seed), 0, static_cast<uint64_t>(offset));
  const uint64_t high = engine();
  return at::detail::createCPUGenerator(high << 32 | engine());
}

void fill_keep_mask(const Tensor& mask, double drop, int64_t seed, int64_t offset) {
  const auto num_bytes = mask.numel();
  auto* bytes = mask.data_ptr<uint8_t>();
  const double threshold = drop * 4294967296.0;  // of 2^32 words
  for (int64_t byte = 0; byte < num_bytes; ++byte) {
    uint8_t bits = 0;
    for (int64_t half = 0; half < 2; ++half) {
      // One subsequence for four elements.
      at::Philox4_32 engine(static_cast<uint64_t>(seed), static_cast<uint64_t>(2 * byte + half),
                            static_cast<uint64_t>(offset));
      for (int64_t bit = 0; bit < 4; ++bit) {
        if (static_cast<double>(engine()) >= threshold) bits |= uint8_t{1} << (4 * half + bit);
      }
    }
    bytes[byte] = bits;
  }
}

Tensor unpack_keep_mask(const Tensor& mask, int64_t first, int64_t count) {
  const Tensor element = at::arange(first, first + count, at::kLong);
  const Tensor bytes = mask.flatten().index({element.div(8, "floor")}).to(at::kLong);
  return at::bitwise_and(at::bitwise_right_shift(bytes, element.remainder(8)), 1).to(at::kBool);
}

OPERATOR(aclnnInplaceNormal,
         [](Tensor x, float mean, float std, int64_t seed, int64_t offset) -> Work {
           return [=] { Tensor(x).normal_(mean, std, generator_for(seed, offset)); };
         })
OPERATOR(aclnnInplaceUniform,
         [](Tensor x, double low, double high, uint64_t seed, uint64_t offset) -> Work {
           return [=] { Tensor(x).uniform_(low, high, generator_for(seed, offset)); };
         })
OPERATOR(aclnnInplaceRandom,
         [](Tensor x, int64_t low, int64_t high, int64_t seed, int64_t offset) -> Work {
           return [=] { Tensor(x).random_(low, high, generator_for(seed, offset)); };
         })
OPERATOR(aclnnInplaceRandomWithoutFromTo, [](Tensor x, int64_t seed, int64_t offset) -> Work {
  return [=] { Tensor(x).random_(generator_for(seed, offset)); };
})
OPERATOR(aclnnInplaceBernoulli, [](Tensor x, Scalar p, int64_t seed, int64_t offset) -> Work {
  return [=] { Tensor(x).bernoulli_(p.toDouble(), generator_for(seed, offset)); };
})
OPERATOR(aclnnInplaceBernoulliTensor, [](Tensor x, Tensor p, int64_t seed, int64_t offset) -> Work {
  return [=] { Tensor(x).bernoulli_(p, generator_for(seed, offset)); };
})
OPERATOR(aclnnRandperm, [](int64_t n, int64_t seed, int64_t offset, Out out) -> Work {
  return [=] { out = at::randperm(n, generator_for(seed, offset), out.view().options()); };
})
OPERATOR(aclnnMultinomial,
         [](Tensor x, int64_t count, bool replace, int64_t seed, int64_t offset, Out out) -> Work {
           return [=] { out = at::multinomial(x, count, replace, generator_for(seed, offset)); };
         })
OPERATOR(aclnnDropoutGenMask,
         [](IntArray, double drop, int64_t seed, int64_t offset, Out mask) -> Work {
           return [=] { fill_keep_mask(mask.view(), drop, seed, offset); };
         })
OPERATOR(aclnnDropoutGenMaskV2,
         [](IntArray, double drop, int64_t seed, int64_t offset, at::ScalarType, Out mask) -> Work {
           return [=] { fill_keep_mask(mask.view(), drop, seed, offset); };
         })
OPERATOR(aclnnDropoutDoMask, [](Tensor x, Tensor mask, double drop, Out out) -> Work {
  return [=] {
    const Tensor keep = unpack_keep_mask(mask, 0, x.numel()).view(x.sizes());
    out = drop == 1.0 ? at::zeros_like(x) : at::where(keep, x / (1.0 - drop), 0.0);
  };
})

}  // namespace simnpu::op
