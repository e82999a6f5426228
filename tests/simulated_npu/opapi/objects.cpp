#include "objects.hpp"

#include <exception>
#include <sstream>

#include "../runtime.hpp"

namespace simnpu::op {

at::ScalarType scalar_type_of(aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_UINT8:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    default:
      TORCH_CHECK(false, "aclDataType ", static_cast<int>(type), " is not modelled");
  }
}

std::string data_type_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "DT_FLOAT";
    case at::kHalf:
      return "DT_FLOAT16";
    case at::kBFloat16:
      return "DT_BF16";
    case at::kDouble:
      return "DT_DOUBLE";
    case at::kChar:
      return "DT_INT8";
    case at::kByte:
      return "DT_UINT8";
    case at::kInt:
      return "DT_INT32";
    case at::kLong:
      return "DT_INT64";
    case at::kBool:
      return "DT_BOOL";
    default:
      return std::string("DT_") + c10::toString(type);
  }
}

namespace {

// The view [dims, strides] of device memory that starts `offset` elements after `data`.
at::Tensor view_memory(at::IntArrayRef dims, at::IntArrayRef strides, int64_t offset,
                       at::ScalarType type, void* data) {
  const auto options = at::TensorOptions().dtype(type);
  const auto item_size = static_cast<int64_t>(c10::elementSize(type));
  int64_t last = 0;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == 0) return at::empty(dims, options);
    last += (dims[i] - 1) * strides[i];
  }
  char* first = static_cast<char*>(data) + offset * item_size;
  TORCH_CHECK(device_of(first, (last + 1) * item_size) >= 0, "a tensor of shape ", dims,
              " and strides ", strides, " does not lie inside one allocation of device memory");
  return at::from_blob(first, dims, strides, options);
}

}  // namespace
}  // namespace simnpu::op

SIMNPU_API aclTensor* aclCreateTensor(const int64_t* dims, uint64_t num_dims, aclDataType type,
                                      const int64_t* strides, int64_t offset, aclFormat,
                                      const int64_t*, uint64_t, void* data) {
  auto* tensor = new aclTensor;
  try {
    tensor->view = simnpu::op::view_memory({dims, num_dims}, {strides, num_dims}, offset,
                                           simnpu::op::scalar_type_of(type), data);
  } catch (const c10::Error& error) {
    tensor->invalid = error.what_without_backtrace();
  }
  return tensor;
}

SIMNPU_API int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return ACL_SUCCESS;
}

SIMNPU_API aclScalar* aclCreateScalar(void* value, aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
      return new aclScalar{*static_cast<float*>(value)};
    case ACL_DOUBLE:
      return new aclScalar{*static_cast<double*>(value)};
    case ACL_INT64:
      return new aclScalar{*static_cast<int64_t*>(value)};
    case ACL_INT32:
      return new aclScalar{*static_cast<int32_t*>(value)};
    case ACL_BOOL:
      return new aclScalar{*static_cast<bool*>(value)};
    case ACL_FLOAT16:
      return new aclScalar{static_cast<float>(*static_cast<at::Half*>(value))};
    case ACL_BF16:
      return new aclScalar{static_cast<float>(*static_cast<at::BFloat16*>(value))};
    case ACL_COMPLEX64:
      return new aclScalar{*static_cast<c10::complex<float>*>(value)};
    case ACL_COMPLEX128:
      return new aclScalar{*static_cast<c10::complex<double>*>(value)};
    default:
      return nullptr;
  }
}

SIMNPU_API int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return ACL_SUCCESS;
}

SIMNPU_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{{values, values + size}};
}

SIMNPU_API int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return ACL_SUCCESS;
}

SIMNPU_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{{values, values + size}};
}

SIMNPU_API int aclDestroyFloatArray(const aclFloatArray* array) {
  delete array;
  return ACL_SUCCESS;
}

SIMNPU_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{{values, values + size}};
}

SIMNPU_API int aclDestroyBoolArray(const aclBoolArray* array) {
  delete array;
  return ACL_SUCCESS;
}

SIMNPU_API aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return new aclTensorList{{tensors, tensors + size}};
}

SIMNPU_API int aclDestroyTensorList(const aclTensorList* list) {
  if (list != nullptr) {
    for (const aclTensor* tensor : list->tensors) delete tensor;
  }
  delete list;
  return ACL_SUCCESS;
}

SIMNPU_API aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
  return new aclScalarList{{scalars, scalars + size}};
}

SIMNPU_API int aclDestroyScalarList(const aclScalarList* list) {
  if (list != nullptr) {
    for (const aclScalar* scalar : list->scalars) delete scalar;
  }
  delete list;
  return ACL_SUCCESS;
}

// AdvancedIndex.cpp of op-plugin asks for it.
SIMNPU_API int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* num_dims) {
  const at::IntArrayRef sizes = tensor->view.sizes();
  *num_dims = sizes.size();
  *dims = new int64_t[sizes.size()];
  std::copy(sizes.begin(), sizes.end(), *dims);
  return ACL_SUCCESS;
}
