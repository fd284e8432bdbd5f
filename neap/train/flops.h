// torch-free
// How much arithmetic training a model takes, whatever hardware and tricks do it: the model FLOPs that utilisation is
// told in (Chowdhery et al., PaLM, 2022, appendix B). Recomputation is not part of it.
#pragma once

#include <cstdint>

#include "neap/models/model_config.h"

namespace neap::train {

// Of one token, forward and backward: 6 for every weight that multiplies it, the output head among them but not the
// table of embeddings, of experts those it is routed to; and 12 · layers · heads · head size · sequence for attention,
// counted over the whole sequence (latent attention: the mean of what a query's and a value's head have).
// `frozen`: 4 for every weight, which has no gradient; the adapters beside are left out. `further`: so many layers that
// predict further tokens, each with its projection and the head once more.
double flops_per_token(const models::ModelConfig& config, int64_t sequence, bool frozen = false, int64_t further = 0);

}  // namespace neap::train
