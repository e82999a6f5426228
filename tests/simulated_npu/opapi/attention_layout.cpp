#include "attention_layout.hpp"

#include <algorithm>

namespace simnpu::op {
namespace {

int axis_of(const std::string& layout, char letter) {
  const std::size_t place = layout.find(letter);
  return place == std::string::npos ? -1 : static_cast<int>(place);
}

}  // namespace

std::string input_layout(const std::string& name) {
  return name.substr(0, name.find('_'));
}

std::string output_layout(const std::string& name) {
  const std::size_t bar = name.find('_');
  return bar == std::string::npos ? name : name.substr(bar + 1);
}

bool is_packed(const std::string& layout) {
  return axis_of(layout, 'T') >= 0;
}

int batch_axis(const std::string& layout) {
  return axis_of(layout, 'B');
}

int row_axis(const std::string& layout) {
  return axis_of(layout, is_packed(layout) ? 'T' : 'S');
}

int head_axis(const std::string& layout) {
  return axis_of(layout, 'N');
}

at::Tensor rows_of(const at::Tensor& tensor, const std::string& layout, int64_t heads,
                   int64_t batch, Range rows) {
  at::Tensor view = tensor.slice(row_axis(layout), rows.begin, rows.end);
  std::string axes = layout;
  if (const int axis = batch_axis(axes); axis >= 0) {
    view = view.select(axis, batch);
    axes.erase(axis, 1);
  }
  if (head_axis(axes) < 0) {
    TORCH_CHECK(view.size(-1) % heads == 0, "H ", view.size(-1), " is not a multiple of ", heads,
                " heads");
    view = view.unflatten(-1, {heads, view.size(-1) / heads});
    axes = "SND";
  }
  return head_axis(axes) == 0 ? view : view.transpose(0, 1);
}

std::vector<Range> packed_rows(const std::vector<int64_t>& cumulative) {
  std::vector<Range> ranges;
  int64_t begin = 0;
  for (const int64_t end : cumulative) {
    ranges.push_back({begin, std::max(begin, end)});
    begin = std::max(begin, end);
  }
  return ranges;
}

std::vector<Range> padded_rows(const std::vector<int64_t>& lengths, int64_t batch, int64_t rows) {
  std::vector<Range> ranges;
  for (int64_t entry = 0; entry < batch; ++entry) {
    int64_t length = rows;
    if (!lengths.empty()) length = lengths[lengths.size() == 1 ? 0 : entry];
    ranges.push_back({0, length});
  }
  return ranges;
}

}  // namespace simnpu::op
