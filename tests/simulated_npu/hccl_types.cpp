#include "hccl_types.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace simnpu::hccl {
namespace {

struct BFloat16 {
  std::uint16_t bits;

  explicit operator float() const {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  // Rounds to nearest, ties to even; a NaN stays one.
  explicit BFloat16(float value) {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fc0 : static_cast<std::uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
};

template <typename Value>
Value combine(Value a, Value b, HcclReduceOp reduction) {
  switch (reduction) {
    case HCCL_REDUCE_PROD:
      return a * b;
    case HCCL_REDUCE_MAX:
      return std::max(a, b);
    case HCCL_REDUCE_MIN:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// Wide is the type in which one step is computed.
template <typename Stored, typename Wide>
void accumulate_as(void* total, const void* part, std::uint64_t count, HcclReduceOp reduction) {
  auto* totals = static_cast<Stored*>(total);
  const auto* parts = static_cast<const Stored*>(part);
  for (std::uint64_t i = 0; i < count; ++i) {
    totals[i] = static_cast<Stored>(
        combine<Wide>(static_cast<Wide>(totals[i]), static_cast<Wide>(parts[i]), reduction));
  }
}

}  // namespace

std::size_t element_size(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 0;
  }
}

const char* name_of(HcclDataType type) {
  constexpr const char* names[] = {
      "int8",   "int16",   "int32",    "float16",     "float32",     "int64",
      "uint64", "uint8",   "uint16",   "uint32",      "float64",     "bfloat16",
      "int128", "unknown", "hifloat8", "float8_e4m3", "float8_e5m2", "float8_e8m0"};
  return static_cast<std::size_t>(type) < std::size(names) ? names[type] : "unknown";
}

const char* name_of(HcclReduceOp reduction) {
  constexpr const char* names[] = {"sum", "prod", "max", "min"};
  return static_cast<std::size_t>(reduction) < std::size(names) ? names[reduction] : "none";
}

bool reduces(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32:
    case HCCL_DATA_TYPE_BFP16:
      return true;
    default:
      return false;
  }
}

void accumulate(void* total, const void* part, std::uint64_t count, HcclDataType type,
                HcclReduceOp reduction) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return accumulate_as<std::int8_t, std::int8_t>(total, part, count, reduction);
    case HCCL_DATA_TYPE_INT16:
      return accumulate_as<std::int16_t, std::int16_t>(total, part, count, reduction);
    case HCCL_DATA_TYPE_INT32:
      return accumulate_as<std::int32_t, std::int32_t>(total, part, count, reduction);
    case HCCL_DATA_TYPE_INT64:
      return accumulate_as<std::int64_t, std::int64_t>(total, part, count, reduction);
    case HCCL_DATA_TYPE_FP16:
      return accumulate_as<_Float16, float>(total, part, count, reduction);
    case HCCL_DATA_TYPE_BFP16:
      return accumulate_as<BFloat16, float>(total, part, count, reduction);
    default:
      return accumulate_as<float, float>(total, part, count, reduction);
  }
}

}  // namespace simnpu::hccl
