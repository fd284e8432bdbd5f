// Low-rank adapters (Hu et al., 2021): y = W x + b + scale * B A dropout(x), with A [rank, in] and B [out, rank]
// trained and everything else frozen.
//
//   add_lora(*model, {.rank = 8, .modules = {"q_proj", "v_proj"}}, seed);       // before sharding and the optimizer
//   …train; the optimizer is given what requires gradients…
//   save_lora(lora_state(*model), dir, options, "models/smollm2-135m");         // a directory that PEFT loads
//
// Adapters are children lora_A and lora_B of their Linear, so their parameters have PEFT's names without its prefix:
// model.layers.0.self_attn.q_proj.lora_A.weight. Frozen parameters require no gradients: they take no gradient memory,
// no optimizer state, and linear layers keep no input for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "neap/models/lora_options.h"

namespace neap::models {

// Tensors of adapters by the names of their parameters.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Freezes every parameter of the model and puts adapters beside the linear layers that options.modules names: by the
// last part of their name (q_proj), by a pattern (model.layers.{*}.self_attn.q_proj; neap/autograd/unit_selection.h),
// or all of them ("all-linear"; not the output head, whose weight the loss uses directly). Of a layer that predicts
// further tokens (mtp_layer.h) only what a pattern names by the layer's own number, such as model.layers.61.mlp.*. A is
// drawn as PEFT does, on the CPU and from `seed`, equal on every device; B is zero, so the model computes what it did.
// Returns the names of the adapted modules. UserError, with the model unchanged, when a name matches nothing.
std::vector<std::string> add_lora(torch::nn::Module& model, const LoraOptions& options, uint64_t seed);
// The same with given values, as draw_lora() returns them and read_lora(); on the meta device none are kept.
std::vector<std::string> add_lora(torch::nn::Module& model, const LoraOptions& options, const NamedTensors& values);
// What add_lora() draws: float32 on the CPU. The model may lie on the meta device.
NamedTensors draw_lora(const torch::nn::Module& model, const LoraOptions& options, uint64_t seed);

// The parameters that add_lora() would add, and their sizes.
using LoraShape = std::pair<std::string, std::vector<int64_t>>;
std::vector<LoraShape> lora_shapes(const torch::nn::Module& model, const LoraOptions& options);

// Reads a directory of PEFT, puts its adapters into the model as add_lora() does and fills them. Returns its options,
// with the adapted modules by name. UserError, with the model unchanged, for a file that is missing, broken, or of
// another model: tensors that are missing, unexpected or misshapen are listed.
LoraOptions load_lora(torch::nn::Module& model, const std::filesystem::path& dir);
// The same without touching the model, which may lie on the meta device.
std::pair<LoraOptions, NamedTensors> read_lora(const torch::nn::Module& model, const std::filesystem::path& dir);

bool is_lora_parameter(std::string_view name);

// The adapters' parameters.
NamedTensors lora_state(const torch::nn::Module& model);

// Writes adapter_config.json and adapter_model.safetensors; each file appears whole or not at all, the weights last.
// `base_model` is the name under which PEFT finds the model these belong to.
void save_lora(const NamedTensors& adapters, const std::filesystem::path& dir, const LoraOptions& options,
               const std::string& base_model);

}  // namespace neap::models
