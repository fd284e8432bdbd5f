// The norm of all gradients together, and scaling them down to a limit.
//
// The order of summation is that of the parameters, so the same gradients give the same bits, wherever they came from.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace neap::train {

// The 2-norm over every defined gradient; 0 without any. Waits for the device: it is the one number a step must know.
double global_norm(const std::vector<at::Tensor>& parameters);

// Multiplies the gradients by limit / (norm + 1e-6) when that is below 1, as torch.nn.utils.clip_grad_norm_ does.
// A limit of 0 does nothing. REQUIRES: `norm` is finite.
void clip_to(const std::vector<at::Tensor>& parameters, double norm, double limit);

}  // namespace neap::train
