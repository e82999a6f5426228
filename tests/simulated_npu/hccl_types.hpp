// Data types and reductions of HCCL.
#pragma once

#include <cstddef>
#include <cstdint>

#include "third_party/hccl/inc/hccl/hccl_types.h"

namespace simnpu::hccl {

// Bytes of one element, or 0 for a type that no collective takes.
std::size_t element_size(HcclDataType type);

const char* name_of(HcclDataType type);
const char* name_of(HcclReduceOp reduction);

// int8, int16, int32, int64, float16, float32 and bfloat16 (torch_npu, HCCLUtils.cpp).
bool reduces(HcclDataType type);

// total = total (op) part, element by element; each step rounds to the type.
void accumulate(void* total, const void* part, std::uint64_t count, HcclDataType type,
                HcclReduceOp reduction);

}  // namespace simnpu::hccl
