// torch-free
// How much arithmetic training a model takes, whatever hardware and tricks do it: the model FLOPs that utilisation is
// told in (Chowdhery et al., PaLM, 2022, appendix B). Recomputation is not part of it.
#pragma once

#include <cstdint>

#include "neap/models/llama_config.h"

namespace neap::train {

// Of one token, forward and backward: 6 for every weight that multiplies it, the output head among them but not the
// table of embeddings, and 12 · layers · heads · head size · sequence for attention, counted over the whole sequence.
double flops_per_token(const models::LlamaConfig& config, int64_t sequence);

}  // namespace neap::train
