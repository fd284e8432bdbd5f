// Adapters from and to directories of PEFT.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <system_error>

#include "neap/base/error.h"
#include "neap/models/internal/atomic_file.h"
#include "neap/models/lora.h"
#include "neap/models/safetensors.h"

namespace neap::models {
namespace {

namespace fs = std::filesystem;
using neap::internal::concat;

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";
constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kEnding = ".lora_A.weight";

at::ScalarType type_of(SafeType type, const fs::path& path) {
  switch (type) {
    case SafeType::kF32:
      return at::kFloat;
    case SafeType::kBF16:
      return at::kBFloat16;
    case SafeType::kF16:
      return at::kHalf;
    case SafeType::kF64:
      return at::kDouble;
    default:
      NEAP_USER_ERROR("[lora.adapter] ", path.string(), ": expected floating point tensors; found ", name_of(type));
  }
}

// The tensors of an adapter_model.safetensors by their name in the model.
class AdapterWeights {
 public:
  explicit AdapterWeights(const fs::path& path) : file_(path) {
    for (std::size_t i = 0; i < file_.tensors().size(); ++i) {
      const std::string& name = file_.tensors()[i].name;
      NEAP_CHECK(name.starts_with(kPrefix) && is_lora_parameter(name), "[lora.adapter] ", path.string(),
                 ": expected tensors ", kPrefix, "MODULE.lora_A.weight and .lora_B.weight; found ", name);
      places_.emplace(name.substr(kPrefix.size()), i);
    }
    NEAP_CHECK(!places_.empty(), "[lora.adapter] ", path.string(), ": expected an adapter; found no tensors");
  }

  std::vector<std::string> modules() const {
    std::vector<std::string> names;
    for (const auto& [name, index] : places_) {
      if (name.ends_with(kEnding)) names.push_back(name.substr(0, name.size() - kEnding.size()));
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
      type_of(file_.tensors()[index].type, file_.path());
    }
    return list;
  }

  void fill(const NamedTensors& parameters) const {
    const at::NoGradGuard no_grad;
    for (const auto& [name, parameter] : parameters) parameter.copy_(tensor(places_.at(name)));
  }

 private:
  at::Tensor tensor(std::size_t index) const {
    const SafeTensorInfo& info = file_.tensors()[index];
    at::Tensor out = at::empty(info.shape, at::TensorOptions(type_of(info.type, file_.path())));
    std::memcpy(out.mutable_data_ptr(), file_.bytes(index).data(), file_.bytes(index).size());
    return out;
  }

  SafetensorsFile file_;
  std::map<std::string, std::size_t> places_;
};

}  // namespace

LoraOptions load_lora(torch::nn::Module& model, const fs::path& dir) {
  LoraOptions options = read_adapter_config(dir / kConfig);
  const AdapterWeights weights(dir / kWeights);
  options.modules = weights.modules();
  std::string faults;
  try {
    faults = weights.faults(lora_shapes(model, options));
  } catch (const UserError& error) {  // of a module that is not there
    NEAP_USER_ERROR("[lora.adapter] ", dir.string(), ": the adapter does not fit the model: ", error.what());
  }
  NEAP_CHECK(faults.empty(), "[lora.adapter] ", dir.string(), ": the adapter does not fit the model:", faults);
  add_lora(model, options, /*seed=*/0);
  weights.fill(lora_state(model));
  return options;
}

void save_lora(const NamedTensors& adapters, const fs::path& dir, const LoraOptions& options,
               const std::string& base_model) {
  std::error_code error;
  fs::create_directories(dir, error);
  NEAP_CHECK(!error, "[lora] cannot create ", dir.string(), ": ", error.message());
  internal::AtomicFile config(dir / kConfig);
  config.write(std::as_bytes(std::span<const char>(adapter_config_json(options, base_model))));
  config.commit();
  std::vector<SafeTensorInfo> infos;
  std::vector<at::Tensor> tensors;
  // By name: the same adapter is the same bytes, whoever put it together.
  for (const auto& [name, tensor] : std::map(adapters.begin(), adapters.end())) {
    // float32, as PEFT keeps adapters whatever the model's own type.
    tensors.push_back(tensor.detach().to(at::kCPU, at::kFloat).contiguous());
    infos.push_back({concat(kPrefix, name), SafeType::kF32, tensor.sizes().vec(), 0});
  }
  SafetensorsWriter writer(dir / kWeights, infos, {{"format", "pt"}});
  for (const at::Tensor& tensor : tensors) {
    writer.append({static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
  }
  writer.finish();
}

}  // namespace neap::models
