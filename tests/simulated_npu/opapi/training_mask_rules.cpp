// The rules of FlashAttentionScore about atten_mask, sparse_mode, pre_tockens and next_tockens
// (CN AnalyzeOptionalInput, GetSparseInfo). Without a mask none of the others has any effect, not
// even sparse_mode 3: GetSparseInfo returns at once, and the answer is full attention.
#include "attention_mask.hpp"
#include "refusal.hpp"
#include "training_call.hpp"

namespace simnpu::op {
namespace {

constexpr char kShapes[] = "[B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] and [Sq, Skv].";

template <class... Parts>
void require(bool kept, const Parts&... parts) {
  require_tiling(kept, "FlashAttentionScore", kInnerNull, parts...);
}

void check_shape(const TrainingCall& call) {
  const at::IntArrayRef sizes = call.mask.sizes();
  const int64_t rows = call.longest_query();
  const int64_t keys = call.longest_key();
  const bool compressed = call.sparse_mode >= 2;
  require(sizes.size() == 2 || sizes.size() == 4, "atten mask dim should be 2 or 4, but got ",
          sizes.size());
  if (sizes.size() == 2) {
    const bool fits = compressed || (sizes[0] == rows && sizes[1] == keys);
    require(fits || call.packed(), "get unsupported atten_mask shape, the shape is ",
            shape_text(sizes), ". B=[", call.batch(), "], N=[", call.heads, "], Sq=[", rows,
            "], Skv=[", keys, "], supported atten_mask shape can be ", kShapes);
    require(fits, "get unsupported atten_mask shape, the shape is ", shape_text(sizes), ". MaxSq=[",
            rows, "],  MaxSkv=[", keys,
            "], when input_layout is TND, the supported atten_mask shape is [MaxSq, MaxSkv].");
  } else {
    const bool shared = sizes[0] == 1 && sizes[1] == 1;
    const bool per_entry = sizes[0] == call.batch() && (sizes[1] == 1 || sizes[1] == call.heads);
    const bool fits =
        (shared || per_entry) && sizes[2] == rows && sizes[3] == keys && !call.packed();
    require(fits, "get unsupported atten_mask shape, the shape is ", shape_text(sizes), ". B=[",
            call.batch(), "], N=[", call.heads, "], Sq=[", rows, "], Skv=[", keys,
            "], supported atten_mask shape can be ", kShapes);
  }
  const bool tile = sizes[sizes.size() - 2] == kTileSize && sizes.back() == kTileSize;
  require(!compressed || tile,
          "In the attenmask compression, please set the atten_mask_shape to [2048,2048].");
}

// Some key must be left to compute (CN SparseBandModeCheck); the values printed are the caller's.
void check_padded_window(const TrainingCall& call) {
  if (call.sparse_mode != 0 && call.sparse_mode != 4) return;
  const auto [before, after] = padded_window(call);
  const int64_t rows = call.longest_query();
  const int64_t keys = call.longest_key();
  require(before >= 0 || after >= 0, "PreTokens[", call.before, "] and nextTokens[", call.after,
          "] config error, there is no valid data block.");
  require(before >= 0 || (after >= -before && -before < keys), "PreTokens[", call.before,
          "] and nextTokens[", call.after, "] config error with S1[", rows,
          "], there is no valid data block.");
  require(after >= 0 || (-after <= before && -after < rows), "PreTokens[", call.before,
          "] and nextTokens[", call.after, "] config error with S2[", keys,
          "], there is no valid data block.");
}

// Packed rows that would see no key are refused, where padded ones are given zeros.
void check_packed_entry(const TrainingCall& call, int64_t entry, int64_t rows, int64_t keys) {
  switch (call.sparse_mode) {
    case 0:
      require(keys + call.before >= rows, "Batch[", entry, "] s1[", rows, "] s2[", keys,
              "] has invalid row, check pre_tokens and next_tokens.");
      break;
    case 3:
      require(rows <= keys, "Batch[", entry, "] s1[", rows, "] is larger than s2[", keys,
              "], exist invalid row.");
      break;
    case 4:
      require(rows == 0 || keys == 0 || rows - call.after <= keys, "Batch[", entry, "], s1[", rows,
              "], s2[", keys, "], next_tokens[", call.after, "], has invalid row.");
      break;
    default:
      break;
  }
}

void check_packed_window(const TrainingCall& call) {
  if (call.sparse_mode == 0) {
    require(call.after >= 0, "nextTokens[", call.after,
            "] config error, there is no valid data block.");
    require(call.before >= 0 || call.after >= -call.before, "preTokens[", call.before,
            "] and nextTokens[", call.after, "] config error with S[", call.longest_key(),
            "], has invalid data block.");
  }
  if (call.sparse_mode == 4) {
    require(call.before >= 0, "pre_tokens[", call.before,
            "] config error, has invalid data block.");
    require(call.after >= 0 || call.before + call.after >= 0, "pre_tokens[", call.before,
            "], next_tokens[", call.after, "], invalid config.");
  }
  const std::vector<Range> queries = call.query_rows();
  const std::vector<Range> keys = call.key_rows();
  for (std::size_t i = 0; i < queries.size(); ++i) {
    check_packed_entry(call, static_cast<int64_t>(i), queries[i].length(), keys[i].length());
  }
}

}  // namespace

void check_training_mask(const TrainingCall& call) {
  if (!call.has_mask()) return;
  const at::ScalarType type = call.mask.scalar_type();
  require(type == at::kBool || type == at::kByte, "invalid attenMask dtype[", data_type_name(type),
          "], only support bool or uint8.");
  require(call.sparse_mode <= 4, "sparse_mode ", call.sparse_mode,
          " is not modelled by the simulated NPU");
  check_shape(call);
  if (call.packed()) {
    check_packed_window(call);
  } else {
    check_padded_window(call);
  }
}

}  // namespace simnpu::op
