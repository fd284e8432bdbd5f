// What a Hugging Face model directory holds, read from its headers: no weight is loaded, whatever its size.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/models/model_config.h"

namespace neap::models {

// The tensors of one kind, together. Norms are those of attention and layers alike; shared experts count as mlp, as
// every token passes them.
struct KindOfTensors {
  // embedding, attention, mlp, router, experts, norms, head, or mtp: all of the layers that predict further tokens, and
  // their copies of embedding and head
  std::string_view name;
  int64_t tensors = 0;
  int64_t parameters = 0;
  Bytes bytes;  // in the files
};

struct Inspection {
  ModelConfig config;
  int64_t files = 0;                      // of weights
  std::map<std::string, int64_t> dtypes;  // how many tensors of each: "BF16", …
  std::vector<KindOfTensors> kinds;       // in the order above, without those that the model has not

  KindOfTensors total() const;
  // Without the experts that a token is not routed to, and without what predicts further tokens.
  int64_t parameters_per_token() const;
};

// Checks what load_hf() checks, with the same errors.
Inspection inspect_hf(const std::filesystem::path& dir);

// For people, a few lines.
std::string to_text(const Inspection& inspection);

}  // namespace neap::models
