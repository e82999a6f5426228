// The texts with which CANN's host side turns a call down, in the form that torch_npu appends to
// its RuntimeError.
//
// Sources of the rules in this folder: CN is CANN's operator code, hicann/ops-transformer of
// November 2025, named by function or file; op-plugin is Ascend/op-plugin of August 2026, which is
// the torch_npu side; "documented" is said of the vendor's pages for aclnnFusedInferAttentionScore
// and aclnnFlashAttentionScore. The form of the texts is that of logs in public issues
// (sgl-project/sglang#23572, vllm-project/vllm-omni#845). Nothing here was compared with an NPU.
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

#include "entry.hpp"

namespace simnpu::op {

// "EZ9999: Inner Error! ... <message> ... <op> do tiling failed".
std::string tiling_text(const char* op, const std::string& message);

// "EZ1001 ... <message>": a rule of the aclnn function itself, before tiling.
std::string parameter_text(const std::string& message);

template <class... Parts>
void require_tiling(bool kept, const char* op, int status, const Parts&... parts) {
  if (!kept) throw Refused(status, tiling_text(op, c10::str(parts...)));
}

template <class... Parts>
void require_parameter(bool kept, const Parts&... parts) {
  if (!kept) throw Refused(kInvalidParameter, parameter_text(c10::str(parts...)));
}

// Sizes as CANN prints them: [1, 5, 64, 128].
std::string shape_text(at::IntArrayRef sizes);

}  // namespace simnpu::op
