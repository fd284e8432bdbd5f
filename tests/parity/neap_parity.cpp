// One forward and backward of a Hugging Face model directory, for comparison with transformers.
//
//   neap_parity MODEL_DIR INPUT.safetensors OUTPUT.safetensors [--gradients PREFIX]… [--save DIR]
//               [--adapter DIR [--save-adapter DIR]] [--mtp-weight WEIGHT]
//
// INPUT holds "ids" and "labels" (int64, [batch, sequence]; labels already shifted). OUTPUT gets "logits", "loss" and
// "grad.NAME" of every trained parameter, or of those whose name starts with a PREFIX. --save writes the model again.
// --mtp-weight differentiates the loss of the layers that predict further tokens, too, and writes it as "mtp_loss".
// --adapter puts an adapter of PEFT into the model first, and --save-adapter writes that again.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/files/safetensors.h"
#include "neap/models/hugging_face.h"
#include "neap/models/lora.h"

namespace {

using namespace neap::files;
using namespace neap::models;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

at::Tensor read_integers(const SafetensorsFile& file, const std::string& name) {
  for (std::size_t i = 0; i < file.tensors().size(); ++i) {
    const SafeTensorInfo& info = file.tensors()[i];
    if (info.name != name) continue;
    NEAP_CHECK(info.type == SafeType::kI64, name, ": expected I64; found ", name_of(info.type));
    at::Tensor tensor = at::empty(info.shape, at::kLong);
    std::memcpy(tensor.mutable_data_ptr(), file.bytes(i).data(), file.bytes(i).size());
    return tensor;
  }
  NEAP_USER_ERROR(file.path().string(), ": no tensor ", name);
}

void write(const std::string& path, const Named& tensors) {
  std::vector<SafeTensorInfo> infos;
  for (const auto& [name, tensor] : tensors) infos.push_back({name, SafeType::kF32, tensor.sizes().vec(), 0});
  SafetensorsWriter writer(path, infos);
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor host = tensor.detach().contiguous();
    writer.append({static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes()});
  }
  writer.finish();
}

void run(const std::vector<std::string>& arguments) {
  NEAP_CHECK(arguments.size() >= 3, "usage: neap_parity MODEL_DIR INPUT OUTPUT [--gradients PREFIX]… [--save DIR]");
  std::vector<std::string> prefixes;
  std::string save_dir, adapter_dir, save_adapter_dir;
  double mtp_weight = 0;
  for (std::size_t i = 3; i + 1 < arguments.size(); i += 2) {
    if (arguments[i] == "--gradients") prefixes.push_back(arguments[i + 1]);
    if (arguments[i] == "--save") save_dir = arguments[i + 1];
    if (arguments[i] == "--mtp-weight") mtp_weight = std::stod(arguments[i + 1]);
    if (arguments[i] == "--adapter") adapter_dir = arguments[i + 1];
    if (arguments[i] == "--save-adapter") save_adapter_dir = arguments[i + 1];
  }
  const auto model = model_from_hf(arguments[0], {}, /*with_mtp=*/mtp_weight > 0);
  LoraOptions adapter;
  if (!adapter_dir.empty()) adapter = load_lora(*model, adapter_dir);
  const SafetensorsFile input(arguments[1]);
  const at::Tensor ids = read_integers(input, "ids");
  const at::Tensor labels = read_integers(input, "labels");
  Named out;
  if (mtp_weight > 0) {
    const CausalLM::Losses losses = model->losses(ids, labels);
    (losses.loss + losses.further * mtp_weight).backward();
    out = {{"loss", losses.loss}, {"mtp_loss", losses.further}};
  } else {
    const at::Tensor loss = model->loss(ids, labels);
    loss.backward();
    out = {{"loss", loss}};
  }
  {
    const at::NoGradGuard no_grad;
    out.emplace_back("logits", model->logits(ids));
  }
  for (const auto& item : model->named_parameters()) {
    const auto named = [&](const std::string& prefix) { return item.key().starts_with(prefix); };
    if (!item.value().requires_grad()) continue;
    if (prefixes.empty() || std::ranges::any_of(prefixes, named))
      out.emplace_back("grad." + item.key(), item.value().grad());
  }
  write(arguments[2], out);
  if (!save_dir.empty()) save_hf(*model, save_dir);
  if (!save_adapter_dir.empty()) save_lora(lora_state(*model), save_adapter_dir, adapter, arguments[0]);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
