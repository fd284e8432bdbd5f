// Models from and to Hugging Face directories: config.json, and model.safetensors or the shards that
// model.safetensors.index.json names.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/files/safetensors.h"
#include "neap/models/causal_lm.h"

namespace neap::models {

// What a file has for one parameter or buffer: the tensor itself under its own name, or of stacked experts the matrices
// of each (…experts.3.up_proj.weight). The tensors are views; on the meta device, shapes alone.
std::vector<std::pair<std::string, at::Tensor>> hf_views(const std::string& name, const at::Tensor& tensor);

// Fills the parameters and buffers of `model`, converting to their dtype and device. Names and shapes are compared
// first: missing, unexpected, misshapen and integer tensors are one UserError that lists them, and then the model is
// unchanged. Layers that predict further tokens are left out with a warning, unless the model has them
// (ModelConfig::with_mtp): then their copies of the embedding and the head have to be the same bytes as the model's.
void load_hf(CausalLM& model, const std::filesystem::path& dir);

// A tensor that files may have under a second name: a tied head, and what layers that predict further tokens share.
struct HfCopy {
  std::string name, of;
  bool written;  // by save_hf(), as the published files have them
};
std::vector<HfCopy> hf_copies(const ModelConfig& config);

// Whether a tensor of this name belongs to a layer behind the decoder that predicts further tokens.
bool is_of_mtp_layer(std::string_view name, const ModelConfig& config);
// Whether `dir` holds any. Transformers leaves them out when it saves, but not out of config.json.
bool hf_has_mtp_layers(const ModelConfig& config, const std::filesystem::path& dir);

// A tensor of the file it lies in.
struct StoredTensor {
  files::SafeTensorInfo info;
  std::filesystem::path file;
};
// What `dir` holds of `model`, which may lie on the meta device; with the errors of load_hf(). Reads headers alone.
std::vector<StoredTensor> hf_contents(const CausalLM& model, const std::filesystem::path& dir);

// The model that `dir` holds, on the device and in the dtype of `options` (default: float32 on the CPU); `with_mtp`:
// and its layers that predict further tokens.
std::shared_ptr<CausalLM> model_from_hf(const std::filesystem::path& dir, at::TensorOptions options = {},
                                        bool with_mtp = false);

// The weights of a directory, read piece by piece: by ranks that hold pieces of the model, which may lie on the meta
// device. The files are mapped, so that of them nothing is read but what is asked for.
class HfWeights {
 public:
  // Compares as load_hf() does: UserError that lists what does not fit.
  HfWeights(const CausalLM& model, const std::filesystem::path& dir);
  ~HfWeights();
  HfWeights(const HfWeights&) = delete;
  HfWeights& operator=(const HfWeights&) = delete;

  // As load_hf() does it; the constructor does not.
  void warn_of_what_is_left_out() const;
  // Copies elements begin, begin + 1, … of a parameter or buffer, in row-major order, into `out`: one-dimensional, of
  // any dtype, on any device. REQUIRES: `name` as in named_parameters() or named_buffers(), and so many elements.
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

// One tensor of a directory, made when its turn to be written comes: a model need not be in memory whole.
struct HfTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::function<at::Tensor()> make;
};
// What files have instead of a tensor of the model: itself, or parts of it (hf_views()), for which it is made once if
// they are asked for in order.
std::vector<HfTensor> hf_tensors(const HfTensor& of_model);
// Adds what save_hf() writes a second time (hf_copies()). REQUIRES: `tensors` has what they are copies of.
void add_hf_copies(std::vector<HfTensor>& tensors, const ModelConfig& config);

// The same for tensors from anywhere and the text of their config.json.
void save_hf(const std::string& config_json, const std::vector<HfTensor>& tensors, const std::filesystem::path& dir,
             const SaveOptions& options = {});

}  // namespace neap::models
