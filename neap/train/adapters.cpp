#include "neap/train/adapters.h"

#include <ATen/core/grad_mode.h>

#include <array>
#include <charconv>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "neap/base/error.h"
#include "neap/files/checksum.h"
#include "neap/files/tensor_bytes.h"
#include "neap/models/lora.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/progress.h"

namespace neap::train {
namespace {

std::string checksum_of(const models::NamedTensors& values) {
  files::Checksum checksum;
  for (const auto& [name, value] : std::map(values.begin(), values.end())) {
    checksum.update(files::bytes_of(value.to(at::kFloat).contiguous()));
  }
  return files::checksum_text(checksum.value());
}

// So many digits that other values are other texts.
std::string exactly(double value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

}  // namespace

Adapters::Adapters(torch::nn::Module& model, const LoraSection& lora, uint64_t seed) : model_(model) {
  models::NamedTensors values;
  if (lora.adapter.empty()) {
    options_ = {.rank = lora.rank, .alpha = lora.alpha, .dropout = lora.dropout, .modules = lora.modules};
    values = models::draw_lora(model, options_, seed);
  } else {
    std::tie(options_, values) = models::read_lora(model, lora.adapter);
    checksum_ = checksum_of(values);
  }
  options_.modules = models::add_lora(model, options_, values);
  for (const auto& [name, value] : values) parameters_ += value.numel();
  if (models::lora_state(model).front().second.is_meta()) values_ = std::move(values);
}

void Adapters::fill(const std::vector<shard::Shard>& pieces) {
  const at::NoGradGuard no_grad;
  const std::map<std::string, at::Tensor> by_name(values_.begin(), values_.end());
  for (const shard::Shard& piece : pieces) {
    if (!models::is_lora_parameter(piece.name)) continue;
    piece.data.copy_(by_name.at(piece.name).view(-1).narrow(0, piece.begin, piece.end - piece.begin));
  }
  values_.clear();
}

void Adapters::save(const std::filesystem::path& dir, const std::string& base_model, shard::Sharded* sharded,
                    bool writes) const {
  models::NamedTensors adapters;
  if (sharded == nullptr) {
    adapters = models::lora_state(model_);
  } else {
    for (auto& [name, tensor] : sharded->full_state(models::is_lora_parameter)) {
      adapters.emplace_back(name, std::move(tensor));
    }
  }
  if (writes) models::save_lora(adapters, dir, options_, base_model);
}

std::map<std::string, std::string> Adapters::description() const {
  std::string modules;
  for (const std::string& name : options_.modules) modules += (modules.empty() ? "" : " ") + name;
  return {{"lora.rank", std::to_string(options_.rank)},
          {"lora.alpha",
           neap::internal::concat(exactly(options_.alpha), options_.rank_stabilised ? " (rank-stabilised)" : "")},
          {"lora.dropout", exactly(options_.dropout)},
          {"lora.modules", std::move(modules)},
          {"lora.adapter", checksum_.empty() ? "none" : "one with checksum " + checksum_}};
}

std::string Adapters::describe() const {
  return neap::internal::concat("rank ", options_.rank, ", alpha ", options_.alpha, ", ", options_.modules.size(),
                                " modules, ", fixed(static_cast<double>(parameters_) * 1e-6, 2),
                                " M parameters; the model's own are frozen");
}

}  // namespace neap::train
