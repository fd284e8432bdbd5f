#include "neap/models/hugging_face.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

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
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/models/internal/atomic_file.h"
#include "neap/models/lora.h"
#include "neap/models/safetensors.h"

namespace neap::models {
namespace {

using neap::internal::concat;

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

constexpr std::pair<SafeType, at::ScalarType> kTypes[] = {
    {SafeType::kBool, at::kBool},  {SafeType::kU8, at::kByte},       {SafeType::kI8, at::kChar},
    {SafeType::kI16, at::kShort},  {SafeType::kI32, at::kInt},       {SafeType::kI64, at::kLong},
    {SafeType::kF16, at::kHalf},   {SafeType::kBF16, at::kBFloat16}, {SafeType::kF32, at::kFloat},
    {SafeType::kF64, at::kDouble},
};

at::ScalarType to_torch(SafeType type) {
  return std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& pair) { return pair.first == type; })
      ->second;
}

SafeType to_safe(at::ScalarType type) {
  const auto* found =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& pair) { return pair.second == type; });
  NEAP_CHECK(found != std::end(kTypes), "[models] safetensors cannot hold tensors of ", type);
  return found->first;
}

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
    NEAP_CHECK(fs::is_directory(dir), "[models] expected a model directory; not found: ", dir.string());
    if (fs::exists(dir / kWeights)) return {dir / kWeights};
    NEAP_CHECK(fs::exists(dir / kIndex), "[models] ", dir.string(), ": expected ", kWeights, " or ", kIndex,
               "; found neither; weights in other formats have to be converted to safetensors");
    const Json index = Json::parse(read_text(dir / kIndex), nullptr, /*allow_exceptions=*/false);
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
  const at::ScalarType type = to_torch(place.info().type);
  const std::span<const std::byte> bytes = place.bytes();
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(bytes.data()) % static_cast<std::size_t>(size_of(place.info().type)) == 0;
  if (aligned) return at::from_blob(const_cast<std::byte*>(bytes.data()), place.info().shape, at::TensorOptions(type));
  at::Tensor copy = at::empty(place.info().shape, at::TensorOptions(type));
  std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  return copy;
}

void fill(const at::Tensor& parameter, const Weights::Place& place) {
  const bool as_it_is =
      parameter.is_cpu() && parameter.is_contiguous() && parameter.scalar_type() == to_torch(place.info().type);
  if (as_it_is) {
    place.file->read(place.index, {static_cast<std::byte*>(parameter.mutable_data_ptr()), parameter.nbytes()});
    parameter.unsafeGetTensorImpl()->bump_version();
  } else {
    parameter.copy_(tensor_of(place));
  }
}

// Names of the file that a model need not have a parameter for.
bool may_be_ignored(const std::string& name, const CausalLM& model) {
  return name.ends_with(".rotary_emb.inv_freq") || (name == kHead && model.config().tie_word_embeddings);
}

// Finds what goes where and throws the list of all that does not fit.
std::vector<std::pair<at::Tensor, const Weights::Place*>> match(CausalLM& model, const Weights& weights,
                                                                const fs::path& dir) {
  std::vector<std::pair<at::Tensor, const Weights::Place*>> pairs;
  std::set<std::string> expected;
  std::string faults;
  for (const auto& item : model.named_parameters()) {
    expected.insert(item.key());
    const Weights::Place* place = weights.find(item.key());
    // A tied weight may have been saved under either name.
    if (place == nullptr && item.key() == kEmbedding && model.config().tie_word_embeddings) place = weights.find(kHead);
    if (place == nullptr) {
      faults += "\n  missing: " + item.key();
    } else if (item.value().sizes() != at::IntArrayRef(place->info().shape)) {
      faults += concat("\n  misshapen: ", item.key(), " is ", at::IntArrayRef(place->info().shape), ", expected ",
                       item.value().sizes());
    } else {
      pairs.emplace_back(item.value(), place);
    }
  }
  for (const auto& [name, place] : weights.all()) {
    if (!expected.contains(name) && !may_be_ignored(name, model)) faults += "\n  unexpected: " + name;
  }
  NEAP_CHECK(faults.empty(), "[models] ", dir.string(), ": the tensors do not fit config.json:", faults);
  return pairs;
}

void check_tied(const CausalLM& model, const Weights& weights, const fs::path& dir) {
  const Weights::Place* head = weights.find(kHead);
  const Weights::Place* embedding = weights.find(kEmbedding);
  if (!model.config().tie_word_embeddings || head == nullptr || embedding == nullptr) return;
  NEAP_CHECK(std::ranges::equal(head->bytes(), embedding->bytes()), "[models] ", dir.string(),
             ": config.json ties the embeddings, but ", kHead, " and ", kEmbedding,
             " differ; set tie_word_embeddings to false");
}

using Items = std::vector<std::pair<std::string, at::Tensor>>;

int64_t bytes_of(const Items& items) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : items) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

void write_shard(const fs::path& path, const Items& items) {
  std::vector<SafeTensorInfo> infos;
  for (const auto& [name, tensor] : items)
    infos.push_back({name, to_safe(tensor.scalar_type()), tensor.sizes().vec(), 0});
  SafetensorsWriter writer(path, infos, {{"format", "pt"}});  // transformers asks for the format
  for (const auto& [name, tensor] : items) {
    const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
    writer.append({static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes()});
  }
  writer.finish();
}

void write_text(const fs::path& path, const std::string& text) {
  internal::AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

std::vector<Items> split(const CausalLM& model, int64_t max_shard) {
  std::vector<Items> shards(1);
  int64_t filled = 0;
  for (const auto& item : model.named_parameters()) {
    if (is_lora_parameter(item.key())) continue;  // the model is what adapters stand beside
    const auto bytes = static_cast<int64_t>(item.value().nbytes());
    if (filled > 0 && filled + bytes > max_shard) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().emplace_back(item.key(), item.value());
    filled += bytes;
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

void write_shards(const fs::path& dir, const std::vector<Items>& shards) {
  Json map = Json::object();
  int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    write_shard(dir / name, shards[i]);
    for (const auto& item : shards[i]) map[item.first] = name;
    total += bytes_of(shards[i]);
  }
  write_text(dir / kIndex, Json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n");
}

}  // namespace

void load_hf(CausalLM& model, const fs::path& dir) {
  const Weights weights(dir);
  const auto pairs = match(model, weights, dir);
  check_tied(model, weights, dir);
  const at::NoGradGuard no_grad;
  for (const auto& [parameter, place] : pairs) fill(parameter, *place);
}

std::shared_ptr<CausalLM> model_from_hf(const fs::path& dir, at::TensorOptions options) {
  NEAP_CHECK(fs::is_directory(dir), "[models] expected a model directory; not found: ", dir.string());
  auto model = std::make_shared<CausalLM>(LlamaConfig::from_file(dir / "config.json"), options);
  load_hf(*model, dir);
  return model;
}

void save_hf(const CausalLM& model, const fs::path& dir, const SaveOptions& options) {
  NEAP_CHECK(options.max_shard > Bytes(0), "[models] save: max_shard must be positive; found ", options.max_shard);
  std::error_code error;
  fs::create_directories(dir, error);
  NEAP_CHECK(!error, "[models] cannot create ", dir.string(), ": ", error.message());
  const at::ScalarType dtype = model.parameters().front().scalar_type();
  write_text(dir / "config.json", model.config().to_json(dtype_name(dtype)));
  const std::vector<Items> shards = split(model, options.max_shard.count);
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
