// Adapters from and to directories of PEFT.
#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "neap/base/error.h"
#include "neap/files/atomic_file.h"
#include "neap/files/safetensors.h"
#include "neap/files/tensor_bytes.h"
#include "neap/models/lora.h"

namespace neap::models {
namespace {

namespace fs = std::filesystem;
using neap::internal::concat;

constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kAdapterWeights = "adapter_model.safetensors";
constexpr std::string_view kPeftPrefix = "base_model.model.";
constexpr std::string_view kFirstEnding = ".lora_A.weight";

// The tensors of an adapter_model.safetensors by their name in the model.
class AdapterWeights {
 public:
  explicit AdapterWeights(const fs::path& path) : file_(path) {
    for (std::size_t i = 0; i < file_.tensors().size(); ++i) {
      const std::string& name = file_.tensors()[i].name;
      NEAP_CHECK(name.starts_with(kPeftPrefix) && is_lora_parameter(name), "[lora.adapter] ", path.string(),
                 ": expected tensors ", kPeftPrefix, "MODULE.lora_A.weight and .lora_B.weight; found ", name);
      places_.emplace(name.substr(kPeftPrefix.size()), i);
    }
    NEAP_CHECK(!places_.empty(), "[lora.adapter] ", path.string(), ": expected an adapter; found no tensors");
  }

  std::vector<std::string> modules() const {
    std::vector<std::string> names;
    for (const auto& [name, index] : places_) {
      if (name.ends_with(kFirstEnding)) names.push_back(name.substr(0, name.size() - kFirstEnding.size()));
    }
    return names;
  }

  // What does not fit, a line each.
  std::string faults(const std::vector<LoraShape>& expected) const {
    std::string list;
    std::set<std::string> names;
    for (const auto& [name, sizes] : expected) {
      names.insert(name);
      const auto found = places_.find(name);
      if (found == places_.end()) {
        list += "\n  missing: " + name;
      } else if (const auto& shape = file_.tensors()[found->second].shape; shape != sizes) {
        list += concat("\n  misshapen: ", name, " is ", at::IntArrayRef(shape), ", expected ", at::IntArrayRef(sizes));
      }
    }
    for (const auto& [name, index] : places_) {
      if (!names.contains(name)) list += "\n  unexpected: " + name;
      const files::SafeType type = file_.tensors()[index].type;
      NEAP_CHECK(at::isFloatingType(files::to_torch(type)), "[lora.adapter] ", file_.path().string(),
                 ": expected floating-point tensors; found ", files::name_of(type));
    }
    return list;
  }

  // Copies of the tensors `names` names.
  NamedTensors tensors(const std::vector<LoraShape>& names) const {
    NamedTensors out;
    for (const auto& [name, sizes] : names) {
      const std::size_t index = places_.at(name);
      const files::SafeType type = file_.tensors()[index].type;
      out.emplace_back(name, files::tensor_over(file_.bytes(index), type, sizes).clone());
    }
    return out;
  }

 private:
  files::SafetensorsFile file_;
  std::map<std::string, std::size_t> places_;
};

}  // namespace

std::pair<LoraOptions, NamedTensors> read_lora(const torch::nn::Module& model, const fs::path& dir) {
  LoraOptions options = read_adapter_config(dir / kAdapterConfig);
  const AdapterWeights weights(dir / kAdapterWeights);
  options.modules = weights.modules();
  std::vector<LoraShape> shapes;
  try {
    shapes = lora_shapes(model, options);
  } catch (const UserError& error) {  // of a module that is not there
    NEAP_USER_ERROR("[lora.adapter] ", dir.string(), ": the adapter does not fit the model: ", error.what());
  }
  const std::string faults = weights.faults(shapes);
  NEAP_CHECK(faults.empty(), "[lora.adapter] ", dir.string(), ": the adapter does not fit the model:", faults);
  NamedTensors tensors = weights.tensors(shapes);
  return {std::move(options), std::move(tensors)};
}

LoraOptions load_lora(torch::nn::Module& model, const fs::path& dir) {
  auto [options, tensors] = read_lora(model, dir);
  add_lora(model, options, tensors);
  return options;
}

void save_lora(const NamedTensors& adapters, const fs::path& dir, const LoraOptions& options,
               const std::string& base_model) {
  std::error_code error;
  fs::create_directories(dir, error);
  NEAP_CHECK(!error, "[lora] cannot create ", dir.string(), ": ", error.message());
  files::write_text(dir / kAdapterConfig, adapter_config_json(options, base_model));
  std::vector<files::SafeTensorInfo> infos;
  std::vector<at::Tensor> tensors;
  // By name: the same adapter is the same bytes, whoever put it together.
  for (const auto& [name, tensor] : std::map(adapters.begin(), adapters.end())) {
    // float32, as PEFT keeps adapters whatever the model's own type.
    tensors.push_back(tensor.detach().to(at::kCPU, at::kFloat).contiguous());
    infos.push_back({concat(kPeftPrefix, name), files::SafeType::kF32, tensor.sizes().vec(), 0});
  }
  files::SafetensorsWriter writer(dir / kAdapterWeights, infos, {{"format", "pt"}});
  for (const at::Tensor& tensor : tensors) {
    writer.append(files::bytes_of(tensor));
  }
  writer.finish();
}

}  // namespace neap::models
