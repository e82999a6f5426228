// Attention of one batch entry in float32, forward and backward, as the fused kernels define it.
#pragma once

#include <ATen/ATen.h>

#include "attention_mask.hpp"

namespace simnpu::op {

// What a row gives whose computed scores are all hidden: the average of V over them, because all
// are equal, or zeros, with the kernels' handling of invalid rows. A row with no computed score
// gives zeros always.
enum class EmptyRows { kAverage, kZero };

struct Problem {
  at::Tensor query;  // [N, Sq, D]
  at::Tensor key;    // [Nkv, Sk, D], N % Nkv == 0
  at::Tensor value;  // [Nkv, Sk, Dv]
  double scale = 1.0;
  at::Tensor bias;  // added to the scaled scores; broadcasts to [N, Sq, Sk]; may be undefined
  Visibility visible;
  EmptyRows empty_rows = EmptyRows::kAverage;
  at::Tensor keep;  // bool [N, Sq, Sk] of dropout; may be undefined
  double keep_prob = 1.0;
};

// float32. Rows that give zeros have max -FLT_MAX and sum FLT_MAX, the training kernel's
// convention.
struct Attention {
  at::Tensor out;   // [N, Sq, Dv]
  at::Tensor max;   // [N, Sq, 1]
  at::Tensor sum;   // [N, Sq, 1], before dropout
  at::Tensor zero;  // bool [N, Sq, 1]: this row was given zeros
};

struct Gradients {
  at::Tensor query;  // [N, Sq, D]
  at::Tensor key;    // [Nkv, Sk, D]
  at::Tensor value;  // [Nkv, Sk, Dv]
  at::Tensor bias;   // [N, Sq, Sk]
};

Attention attend(const Problem& problem);

// The gradients of attend, which the kernel gets from its saved output, max and sum ([N, Sq, 1]
// each).
Gradients attend_backward(const Problem& problem, const at::Tensor& out, const at::Tensor& max,
                          const at::Tensor& sum, const at::Tensor& grad_out);

}  // namespace simnpu::op
