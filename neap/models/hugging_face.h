// Models from and to Hugging Face directories: config.json, and model.safetensors or the shards that
// model.safetensors.index.json names.
#pragma once

#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "neap/base/bytes.h"
#include "neap/models/causal_lm.h"

namespace neap::models {

// Fills the parameters of `model`, converting to their dtype and device. Names and shapes are compared first: missing,
// unexpected, misshapen and integer tensors are one UserError that lists them, and then the model is unchanged.
void load_hf(CausalLM& model, const std::filesystem::path& dir);

// The model that `dir` holds, on the device and in the dtype of `options` (default: float32 on the CPU).
std::shared_ptr<CausalLM> model_from_hf(const std::filesystem::path& dir, at::TensorOptions options = {});

// The weights of a directory, read piece by piece: by ranks that hold pieces of the model, which may lie on the meta
// device. The files are mapped, so that of them nothing is read but what is asked for.
class HfWeights {
 public:
  // Compares as load_hf() does: UserError that lists what does not fit.
  HfWeights(const CausalLM& model, const std::filesystem::path& dir);
  ~HfWeights();
  HfWeights(const HfWeights&) = delete;
  HfWeights& operator=(const HfWeights&) = delete;

  // Copies elements begin, begin + 1, … of a parameter, in row-major order, into `out`: one-dimensional, of any dtype,
  // on any device. REQUIRES: `name` as in named_parameters(), and so many elements.
  void read(const std::string& name, int64_t begin, const at::Tensor& out) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

struct SaveOptions {
  Bytes max_shard = Bytes(int64_t{5} << 30);  // more than this is split into shards with an index
};

// Writes config.json and the weights in their own dtype. Every file appears whole or not at all (temporary file, fsync,
// rename); the index, or the only weights file, comes last. Creates `dir`; leaves other files in it alone.
void save_hf(const CausalLM& model, const std::filesystem::path& dir, const SaveOptions& options = {});

}  // namespace neap::models
