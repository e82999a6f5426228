// Where a batch entry's heads, rows and head dim lie in each input layout of the fused attention
// operators.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace simnpu::op {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t length() const { return end - begin; }
};

// B batch, S rows, N heads, D head dim, H = N * D, T = rows of all batch entries, one after the
// other. FusedInferAttentionScore also has names of two layouts, query's and output's: BNSD_BSND.
std::string input_layout(const std::string& name);
std::string output_layout(const std::string& name);

// TND and NTD: no batch axis, entries are told apart by cumulative lengths.
bool is_packed(const std::string& layout);

// Which axis of a tensor is the batch, the rows, the heads; -1 for an axis that the layout has not.
int batch_axis(const std::string& layout);
int row_axis(const std::string& layout);
int head_axis(const std::string& layout);

// The [heads, rows, dim] view of rows `rows` of batch entry `batch`. `heads` is used only by BSH
// and SBH, which hide the head axis: there it decides how H is cut, rightly or wrongly.
at::Tensor rows_of(const at::Tensor& tensor, const std::string& layout, int64_t heads,
                   int64_t batch, Range rows);

// Packed rows of each batch entry, from cumulative lengths without the leading 0. An entry whose
// length would be negative is empty.
std::vector<Range> packed_rows(const std::vector<int64_t>& cumulative);

// The first lengths[b] rows of each batch entry; one length stands for all, none for `rows`.
std::vector<Range> padded_rows(const std::vector<int64_t>& lengths, int64_t batch, int64_t rows);

}  // namespace simnpu::op
