#include "neap/models/hugging_face.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/base/json_text.h"
#include "neap/base/log.h"
#include "neap/files/atomic_file.h"
#include "neap/files/safetensors.h"
#include "neap/files/tensor_bytes.h"
#include "neap/models/lora.h"

namespace neap::models {
namespace {

using files::SafeTensorInfo;
using files::SafetensorsFile;
using files::SafetensorsWriter;
using neap::internal::concat;

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

std::string dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    default:
      NEAP_USER_ERROR("[models] expected a model of float32, bfloat16, float16 or float64; found ", type);
  }
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  NEAP_CHECK(file.good(), "[models] ", path.string(), " cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// All tensors of a directory, whatever number of files they lie in.
class Weights {
 public:
  struct Place {
    const SafetensorsFile* file;
    std::size_t index;
    const SafeTensorInfo& info() const { return file->tensors()[index]; }
    std::span<const std::byte> bytes() const { return file->bytes(index); }
  };

  explicit Weights(const fs::path& dir) {
    for (const fs::path& path : weight_files(dir)) {
      const auto& file = files_.emplace_back(std::make_unique<SafetensorsFile>(path));
      for (std::size_t i = 0; i < file->tensors().size(); ++i) {
        const bool fresh = places_.try_emplace(file->tensors()[i].name, Place{file.get(), i}).second;
        NEAP_CHECK(fresh, "[models] ", path.string(), ": tensor '", file->tensors()[i].name,
                   "' also lies in another file of the index");
      }
    }
  }

  const Place* find(const std::string& name) const {
    const auto found = places_.find(name);
    return found == places_.end() ? nullptr : &found->second;
  }
  const std::map<std::string, Place>& all() const { return places_; }

 private:
  static std::vector<fs::path> weight_files(const fs::path& dir) {
    std::error_code error;
    NEAP_CHECK(fs::is_directory(dir, error), "[models] expected a model directory; not found: ", dir.string());
    if (fs::exists(dir / kWeights, error)) return {dir / kWeights};
    NEAP_CHECK(fs::exists(dir / kIndex, error), "[models] ", dir.string(), ": expected ", kWeights, " or ", kIndex,
               "; found neither; weights in other formats have to be converted to safetensors");
    const auto index = parse_json<Json>(read_text(dir / kIndex));
    const bool usable = index.is_object() && index.contains("weight_map") && index["weight_map"].is_object();
    NEAP_CHECK(usable, "[models] ", (dir / kIndex).string(), ": expected a JSON object with a weight_map");
    std::set<fs::path> paths;
    for (const auto& [name, file] : index["weight_map"].items()) {
      NEAP_CHECK(file.is_string(), "[models] ", (dir / kIndex).string(), ": tensor '", name, "' has no file name");
      // Only names within the directory: an index from elsewhere must not reach other files.
      paths.insert(dir / fs::path(file.get<std::string>()).filename());
    }
    return {paths.begin(), paths.end()};
  }

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> places_;
};

at::Tensor tensor_of(const Weights::Place& place) {
  return files::tensor_over(place.bytes(), place.info().type, place.info().shape);
}

using Items = std::vector<std::pair<std::string, at::Tensor>>;

// All that a file has of a model, as views: not the adapters that stand beside it.
Items file_items(const CausalLM& model) {
  Items items;
  const auto add = [&](const auto& named) {
    for (const auto& item : named) {
      if (is_lora_parameter(item.key())) continue;
      for (auto& view : hf_views(item.key(), item.value())) items.push_back(std::move(view));
    }
  };
  add(model.named_parameters());
  add(model.named_buffers());
  return items;
}

void fill(const at::Tensor& parameter, const Weights::Place& place) {
  const bool as_it_is =
      parameter.is_cpu() && parameter.is_contiguous() && parameter.scalar_type() == files::to_torch(place.info().type);
  if (as_it_is) {
    place.file->read(place.index, {static_cast<std::byte*>(parameter.mutable_data_ptr()), parameter.nbytes()});
    parameter.unsafeGetTensorImpl()->bump_version();
  } else {
    parameter.copy_(tensor_of(place));
  }
}

// Names of the file that a model need not have a parameter for.
bool may_be_ignored(const std::string& name, const CausalLM& model) {
  if (name.ends_with(".rotary_emb.inv_freq")) return true;
  return std::ranges::any_of(hf_copies(model.config()), [&](const HfCopy& copy) { return copy.name == name; });
}

bool any_of_mtp_layers(const Weights& weights, const ModelConfig& config) {
  return std::ranges::any_of(weights.all(), [&](const auto& item) { return is_of_mtp_layer(item.first, config); });
}

struct Match {
  std::vector<std::pair<at::Tensor, const Weights::Place*>> pairs;
  int64_t left_out = 0;  // tensors of layers that predict further tokens, which the model has not
};

void check_copies(const ModelConfig& config, const Weights& weights, const fs::path& dir) {
  for (const HfCopy& copy : hf_copies(config)) {
    const Weights::Place* found = weights.find(copy.name);
    const Weights::Place* original = weights.find(copy.of);
    if (original == nullptr && config.tie_word_embeddings) original = weights.find(kHead);
    if (found == nullptr || original == nullptr) continue;
    NEAP_CHECK(std::ranges::equal(found->bytes(), original->bytes()), "[models] ", dir.string(), ": expected ",
               copy.name, " to be ", copy.of, " again; they differ; ",
               copy.name == kHead ? "config.json ties the embeddings: set tie_word_embeddings to false"
                                  : "layers that predict further tokens share the model's own (model.mtp: off does "
                                    "without them)");
  }
}

// Finds what goes where and throws the list of all that does not fit.
Match match(const CausalLM& model, const Weights& weights, const fs::path& dir) {
  const ModelConfig& config = model.config();
  NEAP_CHECK(!config.with_mtp || any_of_mtp_layers(weights, config), "[models] ", dir.string(),
             ": expected tensors of the layers that predict further tokens, which config.json counts "
             "(num_nextn_predict_layers: ",
             config.mtp_layers, "); found none, as transformers leaves them out; model.mtp: off does without them");
  Match found;
  std::set<std::string> expected;
  std::string faults;
  for (const auto& [name, tensor] : file_items(model)) {
    expected.insert(name);
    const Weights::Place* place = weights.find(name);
    // A tied weight may have been saved under either name.
    if (place == nullptr && name == kEmbedding && model.config().tie_word_embeddings) place = weights.find(kHead);
    if (place == nullptr) {
      faults += "\n  missing: " + name;
    } else if (tensor.sizes() != at::IntArrayRef(place->info().shape)) {
      faults +=
          concat("\n  misshapen: ", name, " is ", at::IntArrayRef(place->info().shape), ", expected ", tensor.sizes());
    } else if (!at::isFloatingType(files::to_torch(place->info().type))) {
      faults += concat("\n  not floating-point: ", name, " is ", files::name_of(place->info().type));
    } else {
      found.pairs.emplace_back(tensor, place);
    }
  }
  for (const auto& [name, place] : weights.all()) {
    if (expected.contains(name) || may_be_ignored(name, model)) continue;
    if (!config.with_mtp && is_of_mtp_layer(name, config)) {
      ++found.left_out;
    } else {
      faults += "\n  unexpected: " + name;
    }
  }
  NEAP_CHECK(faults.empty(), "[models] ", dir.string(), ": the tensors do not fit config.json:", faults);
  check_copies(config, weights, dir);
  return found;
}

void warn_of_left_out(int64_t tensors, const fs::path& dir) {
  if (tensors == 0) return;
  log_warning("[models] ", dir.string(), ": ", tensors, " tensors of layers that predict further tokens (",
              "num_nextn_predict_layers) are neither trained nor saved again; model.mtp: load keeps them");
}

int64_t bytes_of(const HfTensor& tensor) {
  return c10::multiply_integers(tensor.sizes) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

void write_shard(const fs::path& path, const std::vector<HfTensor>& items) {
  std::vector<SafeTensorInfo> infos;
  for (const HfTensor& item : items) infos.push_back({item.name, files::to_safe(item.dtype), item.sizes, 0});
  SafetensorsWriter writer(path, infos, {{"format", "pt"}});  // transformers asks for the format
  for (const HfTensor& item : items) {
    const at::Tensor host = item.make().detach().to(at::kCPU).contiguous();
    writer.append(files::bytes_of(host));
  }
  writer.finish();
}

std::vector<std::vector<HfTensor>> split(const std::vector<HfTensor>& tensors, int64_t max_shard) {
  std::vector<std::vector<HfTensor>> shards(1);
  int64_t filled = 0;
  for (const HfTensor& tensor : tensors) {
    const int64_t bytes = bytes_of(tensor);
    if (filled > 0 && filled + bytes > max_shard) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(tensor);
    filled += bytes;
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

void write_shards(const fs::path& dir, const std::vector<std::vector<HfTensor>>& shards) {
  Json map = Json::object();
  int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    write_shard(dir / name, shards[i]);
    for (const HfTensor& item : shards[i]) {
      map[item.name] = name;
      total += bytes_of(item);
    }
  }
  files::write_text(dir / kIndex, Json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n");
}

}  // namespace

Items hf_views(const std::string& name, const at::Tensor& tensor) {
  constexpr std::string_view kGateUp = ".experts.gate_up_proj", kDown = ".experts.down_proj";
  const bool gate_up = name.ends_with(kGateUp);
  if (!gate_up && !name.ends_with(kDown)) return {{name, tensor}};
  const std::string parent = name.substr(0, name.rfind('.') + 1);
  Items views;
  for (int64_t expert = 0; expert < tensor.size(0); ++expert) {
    const at::Tensor own = tensor.detach().select(0, expert);
    const std::string prefix = parent + std::to_string(expert) + '.';
    if (!gate_up) {
      views.emplace_back(prefix + "down_proj.weight", own);
      continue;
    }
    const int64_t size = own.size(0) / 2;
    views.emplace_back(prefix + "gate_proj.weight", own.narrow(0, 0, size));
    views.emplace_back(prefix + "up_proj.weight", own.narrow(0, size, size));
  }
  return views;
}

std::vector<HfTensor> hf_tensors(const HfTensor& of_model) {
  const auto parts =
      hf_views(of_model.name, at::empty(of_model.sizes, at::TensorOptions(of_model.dtype).device(at::kMeta)));
  if (parts.size() == 1) return {of_model};
  std::vector<HfTensor> tensors;
  const auto made = std::make_shared<Items>();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto make = [of_model, made, i, last = i + 1 == parts.size()] {
      if (made->empty()) *made = hf_views(of_model.name, of_model.make());
      at::Tensor part = (*made)[i].second;
      if (last) made->clear();
      return part;
    };
    tensors.push_back({parts[i].first, of_model.dtype, parts[i].second.sizes().vec(), make});
  }
  return tensors;
}

bool is_of_mtp_layer(std::string_view name, const ModelConfig& config) {
  for (int64_t i = 0; i < config.mtp_layers; ++i) {
    if (name.starts_with(concat("model.layers.", config.num_hidden_layers + i, "."))) return true;
  }
  return false;
}

std::vector<HfCopy> hf_copies(const ModelConfig& config) {
  std::vector<HfCopy> copies;
  const char* head = config.tie_word_embeddings ? kEmbedding : kHead;
  if (config.tie_word_embeddings) copies.push_back({kHead, kEmbedding, false});
  for (int64_t i = 0; i < config.built_mtp_layers(); ++i) {
    const std::string layer = concat("model.layers.", config.num_hidden_layers + i, ".");
    copies.push_back({layer + "embed_tokens.weight", kEmbedding, true});
    copies.push_back({layer + "shared_head.head.weight", head, true});
  }
  return copies;
}

void load_hf(CausalLM& model, const fs::path& dir) {
  const Weights weights(dir);
  const Match found = match(model, weights, dir);
  warn_of_left_out(found.left_out, dir);
  const at::NoGradGuard no_grad;
  for (const auto& [parameter, place] : found.pairs) fill(parameter, *place);
}

class HfWeights::Impl {
 public:
  // Elements of a parameter or buffer that one tensor of the files holds.
  struct Segment {
    int64_t begin, end;
    const Weights::Place* place;
  };

  Impl(const CausalLM& model, const fs::path& dir) : weights_(dir), dir_(dir) {
    std::map<const c10::StorageImpl*, std::vector<Segment>> by_storage;
    const Match found = match(model, weights_, dir);
    left_out_ = found.left_out;
    for (const auto& [tensor, place] : found.pairs) {
      const int64_t begin = tensor.storage_offset();
      by_storage[tensor.storage().unsafeGetStorageImpl()].push_back({begin, begin + tensor.numel(), place});
    }
    const auto add = [&](const auto& named) {
      for (const auto& item : named) {
        if (is_lora_parameter(item.key())) continue;
        segments_.emplace(item.key(), by_storage.at(item.value().storage().unsafeGetStorageImpl()));
      }
    };
    add(model.named_parameters());
    add(model.named_buffers());
  }

  const std::vector<Segment>& of(const std::string& name) const { return segments_.at(name); }
  void warn() const { warn_of_left_out(left_out_, dir_); }

 private:
  Weights weights_;
  fs::path dir_;
  int64_t left_out_ = 0;
  std::map<std::string, std::vector<Segment>> segments_;
};

HfWeights::HfWeights(const CausalLM& model, const fs::path& dir) : impl_(std::make_unique<Impl>(model, dir)) {}
HfWeights::~HfWeights() = default;
void HfWeights::warn_of_what_is_left_out() const { impl_->warn(); }

void HfWeights::read(const std::string& name, int64_t begin, const at::Tensor& out) const {
  const at::NoGradGuard no_grad;
  for (const auto& [first, end, place] : impl_->of(name)) {
    const int64_t from = std::max(begin, first), to = std::min(begin + out.numel(), end);
    if (from >= to) continue;
    const auto size = static_cast<std::size_t>(files::size_of(place->info().type));
    const std::span<const std::byte> bytes = place->bytes().subspan(static_cast<std::size_t>(from - first) * size,
                                                                    static_cast<std::size_t>(to - from) * size);
    out.narrow(0, from - begin, to - from).copy_(files::tensor_over(bytes, place->info().type, {to - from}));
  }
}

std::vector<StoredTensor> hf_contents(const CausalLM& model, const fs::path& dir) {
  const Weights weights(dir);
  std::vector<StoredTensor> stored;
  const auto add = [&](const Weights::Place& place) { stored.push_back({place.info(), place.file->path()}); };
  for (const auto& [parameter, place] : match(model, weights, dir).pairs) add(*place);
  for (const HfCopy& copy : hf_copies(model.config())) {
    const Weights::Place* place = weights.find(copy.name);
    if (place != nullptr && copy.written) add(*place);
  }
  return stored;
}

bool hf_has_mtp_layers(const ModelConfig& config, const fs::path& dir) {
  return config.mtp_layers > 0 && any_of_mtp_layers(Weights(dir), config);
}

std::shared_ptr<CausalLM> model_from_hf(const fs::path& dir, at::TensorOptions options, bool with_mtp) {
  std::error_code error;
  NEAP_CHECK(fs::is_directory(dir, error), "[models] expected a model directory; not found: ", dir.string());
  ModelConfig config = ModelConfig::from_file(dir / "config.json");
  config.with_mtp = with_mtp;
  auto model = std::make_shared<CausalLM>(std::move(config), options);
  load_hf(*model, dir);
  return model;
}

void add_hf_copies(std::vector<HfTensor>& tensors, const ModelConfig& config) {
  for (const HfCopy& copy : hf_copies(config)) {
    if (!copy.written) continue;
    HfTensor tensor = *std::ranges::find(tensors, copy.of, &HfTensor::name);
    tensor.name = copy.name;
    tensors.push_back(std::move(tensor));
  }
}

void save_hf(const CausalLM& model, const fs::path& dir, const SaveOptions& options) {
  std::vector<HfTensor> tensors;
  for (auto& [name, view] : file_items(model)) {
    tensors.push_back({name, view.scalar_type(), view.sizes().vec(), [view] { return view; }});
  }
  add_hf_copies(tensors, model.config());
  save_hf(model.config().to_json(dtype_name(model.parameters().front().scalar_type())), tensors, dir, options);
}

void save_hf(const std::string& config_json, const std::vector<HfTensor>& tensors, const fs::path& dir,
             const SaveOptions& options) {
  NEAP_CHECK(options.max_shard > Bytes(0), "[models] save: max_shard must be positive; found ", options.max_shard);
  std::error_code error;
  fs::create_directories(dir, error);
  NEAP_CHECK(!error, "[models] cannot create ", dir.string(), ": ", error.message());
  files::write_text(dir / "config.json", config_json);
  const std::vector<std::vector<HfTensor>> shards = split(tensors, options.max_shard.count);
  // A file of the other layout would be read instead of what is written now.
  if (shards.size() == 1) {
    write_shard(dir / kWeights, shards.front());
    fs::remove(dir / kIndex);
  } else {
    write_shards(dir, shards);
    fs::remove(dir / kWeights);
  }
}

}  // namespace neap::models
