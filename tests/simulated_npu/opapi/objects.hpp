// The aclTensor family of libopapi.so: what a caller hands to an aclnn function.
//
// torch_npu knows these types by name only (they come through dlsym), so their layout is ours. A
// tensor is a CPU at::Tensor that views the device memory; it does not own it, exactly as on a
// device, where torch_npu's caching allocator keeps the memory alive in stream order.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "acl/acl_base.h"

struct aclTensor {
  at::Tensor view;
  std::string invalid;  // why the caller's memory cannot be viewed; empty when it can
};

struct aclScalar {
  at::Scalar value;
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclBoolArray {
  std::vector<uint8_t> values;
};

struct aclTensorList {
  std::vector<const aclTensor*> tensors;  // owned
};

struct aclScalarList {
  std::vector<const aclScalar*> scalars;  // owned
};

namespace simnpu::op {

// Throws c10::Error for a type that no operator here takes (quantised and 4-bit types).
at::ScalarType scalar_type_of(aclDataType type);

// The name CANN's own messages use: DT_BF16.
std::string data_type_name(at::ScalarType type);

}  // namespace simnpu::op
