#include "neap/train/model_directory.h"

#include <torch/nn/module.h>

#include <fstream>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/checkpoint/reader.h"
#include "neap/comm/agreement.h"
#include "neap/files/atomic_directory.h"
#include "neap/files/atomic_file.h"
#include "neap/files/tensor_bytes.h"
#include "neap/models/hugging_face.h"
#include "neap/models/lora.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/checkpoints.h"
#include "neap/train/yaml_config.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;

// What transformers writes beside a model, and reads a tokenizer from.
constexpr const char* kTokenizerFiles[] = {
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json",    "tokenizer.model",     "tokenizer_config.json",  "vocab.json", "vocab.txt"};

void copy_tokenizer(const fs::path& from, const fs::path& to) {
  for (const char* name : kTokenizerFiles) {
    std::ifstream in(from / name, std::ios::binary);
    if (!in.good()) continue;
    const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    files::write_text(to / name, text);
  }
}

void write(const ModelDirectory& target, std::vector<models::HfTensor> tensors) {
  models::add_hf_copies(tensors, target.config);
  files::AtomicDirectory directory(target.path);
  copy_tokenizer(target.source, directory.temporary());
  models::save_hf(target.config.to_json(), tensors, directory.temporary());
  directory.commit();
}

void add(std::vector<models::HfTensor>& tensors, const models::HfTensor& of_model) {
  for (auto& tensor : models::hf_tensors(of_model)) tensors.push_back(std::move(tensor));
}
void add(std::vector<models::HfTensor>& tensors, const std::string& name, const at::Tensor& tensor) {
  add(tensors, {name, tensor.scalar_type(), tensor.sizes().vec(), [tensor] { return tensor; }});
}

}  // namespace

void write_model(const ModelDirectory& target, const torch::nn::Module& model, shard::Sharded* sharded,
                 comm::World* world) {
  std::map<std::string, at::Tensor> full;
  if (sharded != nullptr) full = sharded->full_state();
  comm::together(world, "the exported model", [&] {
    if (comm::rank_of(world) != 0) return;
    std::vector<models::HfTensor> tensors;
    // In the order of the model.
    for (const auto& item : model.named_parameters()) {
      if (models::is_lora_parameter(item.key())) continue;  // the model is what adapters stand beside
      if (sharded == nullptr) {
        add(tensors, item.key(), item.value());
      } else if (const auto found = full.find(item.key()); found != full.end()) {
        add(tensors, item.key(), found->second);
      }
    }
    for (const auto& item : model.named_buffers()) add(tensors, item.key(), item.value());
    write(target, std::move(tensors));
  });
}

void warn_of_export(const fs::path& path, const models::ModelConfig& config, bool adapters) {
  if (adapters) {
    log_warning("[checkpoint.export] ", path.string(),
                " is the model alone, as it was; what was trained are the adapters, in adapter/");
  }
  if (config.mtp_layers == 0 || config.with_mtp) return;
  log_warning("[checkpoint.export] ", path.string(), " is without the model's ", config.mtp_layers,
              config.mtp_layers == 1 ? " layer" : " layers",
              " that predict further tokens (num_nextn_predict_layers); model.mtp: load keeps them");
}

void convert_checkpoint(checkpoint::Reader& reader, const fs::path& out) {
  std::error_code error;
  const bool free = fs::is_directory(out, error) ? fs::is_empty(out, error) : !fs::exists(out, error) && !error;
  NEAP_CHECK(free, "[checkpoint] expected that ", out.string(),
             " is not there yet, or an empty directory; found otherwise; choose another one");
  std::vector<models::HfTensor> tensors;
  int64_t of_adapters = 0;
  for (const std::string prefix : {kParameterPrefix, kBufferPrefix}) {
    for (const auto& [name, tensor] : reader.index().tensors) {
      if (!name.starts_with(prefix)) continue;
      if (models::is_lora_parameter(name)) {
        ++of_adapters;
        continue;
      }
      add(tensors, {name.substr(prefix.size()), files::to_torch(tensor.type), tensor.full_size,
                    [&reader, name = name] { return reader.tensor(name); }});
    }
  }
  const std::string index = (reader.dir() / checkpoint::kIndexName).string();
  const RunConfig config = parse_config(reader.state("config"), index, {});
  models::ModelConfig model = models::ModelConfig::from_json(reader.state("model"), index);
  model.with_mtp = model.mtp_layers > 0;  // a run without them says that there are none
  write({.path = out, .config = model, .source = config.model.path}, std::move(tensors));
  const auto& state = reader.index().state;
  if (const auto left_out = state.find(kLeftOut); left_out != state.end()) {
    log_warning("[checkpoint] ", out.string(), " is without ", left_out->second);
  }
  if (of_adapters > 0) {
    log_warning("[checkpoint] ", out.string(), " is the model alone, as it was; the ", of_adapters,
                " tensors of adapters beside it are left out: a run leaves them in adapter/");
  }
}

}  // namespace neap::train
