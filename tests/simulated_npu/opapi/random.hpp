// Random numbers as functions of (seed, offset, element), so that a call with the same seed and
// offset is the same call: torch_npu takes both from the NPU generator (philox_engine_inputs) and
// the backward pass of dropout hands them in again.
//
// The stream is Philox 4x32-10, as on a device; that a device maps its words to elements in this
// very order is not claimed, so values differ from an NPU's.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace simnpu::op {

// A generator for one call of an operator that ATen has a CPU kernel for.
at::Generator generator_for(int64_t seed, int64_t offset);

// The bit mask of aclnnDropoutGenMask: bit i % 8 of byte i / 8 says whether element i is kept,
// which has probability 1 - drop. `mask` is a uint8 vector of at least num_elements / 8 bytes.
void fill_keep_mask(const at::Tensor& mask, double drop, int64_t seed, int64_t offset);

// Elements [first, first + count) of such a mask as bool.
at::Tensor unpack_keep_mask(const at::Tensor& mask, int64_t first, int64_t count);

}  // namespace simnpu::op
