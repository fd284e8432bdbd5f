#include "neap/shard/options.h"

#include "neap/base/error.h"

namespace neap::shard {

Stage parse_stage(std::string_view name) {
  if (name == "optim") return Stage::kOptimizer;
  if (name == "optim_grads") return Stage::kGradients;
  if (name == "optim_grads_params") return Stage::kParameters;
  NEAP_USER_ERROR("[shard.stage] expected optim, optim_grads or optim_grads_params; found '", name, "'");
}

const char* to_string(Stage stage) {
  switch (stage) {
    case Stage::kOptimizer:
      return "optim";
    case Stage::kGradients:
      return "optim_grads";
    case Stage::kParameters:
      return "optim_grads_params";
  }
  return "?";
}

}  // namespace neap::shard
