// libacl_op_compiler.so. Its options are read and written at import; its single-operator path, to
// which torch_npu falls back for an operator without an aclnn entry, is refused by name.
#include <string>
#include <vector>

#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "runtime.hpp"

namespace {

struct Description {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> sizes;
};

// What a refused operator's attributes and buffers point to: nobody reads them.
char placeholder;

const Description& described_by(const aclTensorDesc* handle) {
  return *reinterpret_cast<const Description*>(handle);
}

aclError refuse(const char* name) {
  simnpu::set_error(std::string("simnpu: torch_npu fell back to the aclop operator ") + name +
                    ", because the simulated NPU has no aclnn entry for it; "
                    "tests/simulated_npu/opapi/entry.hpp tells how to add one");
  return ACL_ERROR_OP_NOT_FOUND;
}

}  // namespace

SIMNPU_API aclError aclSetCompileopt(aclCompileOpt, const char*) {
  return ACL_SUCCESS;
}

SIMNPU_API size_t aclGetCompileoptSize(aclCompileOpt) {
  return 1;
}

SIMNPU_API aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  if (length) value[0] = '\0';
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopCompileAndExecute(const char* name, int, const aclTensorDesc* const[],
                                           const aclDataBuffer* const[], int,
                                           const aclTensorDesc* const[], aclDataBuffer* const[],
                                           const aclopAttr*, aclopEngineType, aclopCompileType,
                                           const char*, aclrtStream) {
  return refuse(name);
}

SIMNPU_API aclError aclopCompileAndExecuteV2(const char* name, int, aclTensorDesc*[],
                                             aclDataBuffer*[], int, aclTensorDesc*[],
                                             aclDataBuffer*[], aclopAttr*, aclopEngineType,
                                             aclopCompileType, const char*, aclrtStream) {
  return refuse(name);
}

SIMNPU_API aclopAttr* aclopCreateAttr() {
  return reinterpret_cast<aclopAttr*>(&placeholder);
}

SIMNPU_API void aclopDestroyAttr(const aclopAttr*) {}

SIMNPU_API aclDataBuffer* aclCreateDataBuffer(void*, size_t) {
  return reinterpret_cast<aclDataBuffer*>(&placeholder);
}

SIMNPU_API aclError aclDestroyDataBuffer(const aclDataBuffer*) {
  return ACL_SUCCESS;
}

SIMNPU_API aclTensorDesc* aclCreateTensorDesc(aclDataType type, int num_dims, const int64_t* sizes,
                                              aclFormat format) {
  auto* description = new Description{type, format, {sizes, sizes + num_dims}};
  return reinterpret_cast<aclTensorDesc*>(description);
}

SIMNPU_API void aclDestroyTensorDesc(const aclTensorDesc* handle) {
  delete &described_by(handle);
}

SIMNPU_API aclDataType aclGetTensorDescType(const aclTensorDesc* handle) {
  return described_by(handle).type;
}

SIMNPU_API aclFormat aclGetTensorDescFormat(const aclTensorDesc* handle) {
  return described_by(handle).format;
}

SIMNPU_API size_t aclGetTensorDescNumDims(const aclTensorDesc* handle) {
  return described_by(handle).sizes.size();
}

SIMNPU_API aclError aclGetTensorDescDimV2(const aclTensorDesc* handle, size_t dim, int64_t* size) {
  *size = described_by(handle).sizes.at(dim);
  return ACL_SUCCESS;
}

SIMNPU_API void aclSetTensorDescName(aclTensorDesc*, const char*) {}

SIMNPU_API aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrFloat(aclopAttr*, const char*, float) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrString(aclopAttr*, const char*, const char*) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*,
                                            const int64_t* const[]) {
  return ACL_SUCCESS;
}
