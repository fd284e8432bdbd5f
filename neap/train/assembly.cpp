#include "neap/train/assembly.h"

#include <c10/util/accumulate.h>

#include <filesystem>
#include <utility>

#include "neap/autograd/named_hook_points.h"
#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/comm/launch.h"
#include "neap/models/hugging_face.h"
#include "neap/train/foreign_blocks.h"
#include "neap/train/model_in_pieces.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;

// Chooses units in a model without memory, to find out before the run begins whether they exist.
void check_units(const RunConfig& config, models::CausalLM& model) {
  if (config.offload.options.mode != offload::Mode::kOff) {
    const auto units = autograd::select_hook_points(model, patterns_of(config.offload), "offload");
    offload::validate(config.offload.options, static_cast<int64_t>(units.size()));
  }
  if (config.recompute.mode != RecomputeMode::kNone) {
    autograd::select_hook_points(model, patterns_of(config.recompute), "recompute");
  }
}

models::ModelConfig read_model(const ModelSection& section) {
  models::ModelConfig model = models::ModelConfig::from_file(fs::path(section.path) / "config.json");
  model.with_mtp = section.mtp != MtpMode::kOff;
  NEAP_CHECK(!model.with_mtp || model.mtp_layers > 0,
             "[model.mtp] expected a DeepSeek-V3 with layers that predict further tokens (num_nextn_predict_layers in ",
             "config.json); found none in ", section.path, "; leave model.mtp out");
  return model;
}

std::optional<int64_t> end_token_of(const DataSection& data, const models::ModelConfig& model) {
  if (data.documents == Documents::kJoined) return std::nullopt;
  const std::optional<int64_t> token = data.end_token ? data.end_token : model.eos_token_id;
  NEAP_CHECK(token, "[data.end_token] expected the token that documents end with: config.json has no eos_token_id");
  NEAP_CHECK(*token < model.vocab_size, "[data.end_token] expected a token below the model's vocabulary of ",
             model.vocab_size, "; found ", *token);
  return token;
}

// Without a single end all of it would be one document, which nobody asks to be kept apart.
void check_documents(const TokenFile& tokens, std::optional<int64_t> end_token) {
  NEAP_CHECK(!end_token || tokens.contains(*end_token), "[data.documents] expected documents that end with token ",
             end_token.value_or(0), "; found none in ", tokens.name(),
             "; give the right data.end_token, or data.documents: joined");
}

// Those of a layer that does not run would have no gradients.
void check_adapters(const RunConfig& config, models::CausalLM& model) {
  if (config.model.mtp != MtpMode::kLoad) return;
  for (const auto& [name, adapter] : models::lora_state(model)) {
    NEAP_CHECK(!models::is_of_mtp_layer(name, model.config()), "[lora.modules] expected adapters of layers that run; ",
               "found one at ", name, ", which predicts further tokens; model.mtp: train runs it");
  }
}

}  // namespace

Input::Input(const RunConfig& config)
    : model(read_model(config.model)),
      tokens(TokenFile::open(config.data.path, config.data.format, config.data.token_type)),
      end_token(end_token_of(config.data, model)),
      sequences(tokens, {.length = config.train.sequence,
                         .shuffle = config.data.shuffle,
                         .seed = static_cast<uint64_t>(config.train.seed),
                         .end_token = end_token}) {
  NEAP_CHECK(config.train.sequence <= model.max_position_embeddings, "[train.sequence] expected at most ",
             model.max_position_embeddings, ", the model's max_position_embeddings; found ", config.train.sequence);
  tokens.check_vocabulary(model.vocab_size);
  check_documents(tokens, end_token);
  if (!config.data.eval.empty()) {
    eval_tokens.emplace(TokenFile::open(config.data.eval, config.data.format, config.data.token_type));
    eval_tokens->check_vocabulary(model.vocab_size);
    check_documents(*eval_tokens, end_token);
    eval_sequences.emplace(
        *eval_tokens,
        Sequences::Options{.length = config.train.sequence, .shuffle = false, .seed = 0, .end_token = end_token});
  }
  check_demands(config.demands, model.num_hidden_layers);
  const auto skeleton = model_without_memory(model);
  check_units(config, *skeleton);
  if (config.model.init == Init::kPretrained) const models::HfWeights fit(*skeleton, config.model.path);
  if (!config.lora.on()) return;
  const Adapters fit(*skeleton, config.lora, static_cast<uint64_t>(config.train.seed));
  check_adapters(config, *skeleton);
  adapters = fit.description();
}

checkpoint::State Input::description() const {
  checkpoint::State state(adapters.begin(), adapters.end());
  if (model.mtp_layers > 0 && !model.with_mtp) {
    state.emplace(kLeftOut, neap::internal::concat("the layers that predict further tokens (num_nextn_predict_layers: ",
                                                   model.mtp_layers, "); model.mtp: load would have kept them"));
  }
  return state;
}

Assembly::Assembly(const RunConfig& config, const Input& input, const Shell& shell)
    : config_(config), device_(device::Device::of(shell.device)), ranks_(shell.ranks) {
  if (ranks_ == nullptr && config.train.dtype != Dtype::kFloat32) be_one_rank();
  guarded("loading the model", [&] { load_model(input); });
  if (config.data.documents == Documents::kSeparate) model_->separate_documents(input.end_token.value());
  if (config.offload.options.mode != offload::Mode::kOff) {
    engine_.emplace(config.offload.options, offload::Resources{.pool = nullptr, .recorder = shell.recorder});
    engine_->attach(*model_, patterns_of(config.offload));
  }
  if (config.recompute.mode != RecomputeMode::kNone) {
    recompute_.emplace(config.recompute.options, shell.recorder);
    recompute_->attach(*model_, patterns_of(config.recompute));
  }
  if (auto experts = model_->expert_layers(config.model.mtp == MtpMode::kTrain); !experts.empty()) {
    // With adapters the biases are frozen, too: what is saved of them would not fit a model that moved.
    balance_.emplace(std::move(experts), adapters_ ? 0 : config.train.expert_bias_rate, world_of(shell));
  } else if (config.train.expert_bias_rate != RunConfig{}.train.expert_bias_rate && writes(shell)) {
    log_warning("train.expert_bias_rate has no effect: the model has no experts");
  }
  guarded("allocating the optimizer's state", [&] { make_optimizer(); });
  // A rank that could not get here is missed now, not by a collective of a device, which waits for it to connect.
  if (ranks_ != nullptr) ranks_->world.all().barrier("the model").wait();
}

std::vector<at::Tensor> Assembly::frozen_parameters() const {
  std::vector<at::Tensor> frozen;
  for (const at::Tensor& parameter : model_->parameters()) {
    if (!parameter.requires_grad()) frozen.push_back(parameter);
  }
  return frozen;
}

int64_t Assembly::parameter_count() {
  int64_t count = 0;
  if (!sharded_) {
    for (const at::Tensor& parameter : model_->parameters()) count += parameter.numel();
    return count;
  }
  for (const shard::Shard& shard : sharded_->shards()) count += c10::multiply_integers(shard.full_size);
  return count;
}

namespace {

Trainer::Loss loss_of(std::shared_ptr<models::CausalLM> model, shard::Sharded* sharded, double z_loss) {
  return [model = std::move(model), sharded, z_loss](const at::Tensor& inputs, const at::Tensor& labels,
                                                     double divisor) -> Trainer::LossValue {
    const models::LossOptions options{.z_loss = z_loss, .divisor = divisor};
    const auto forward = [&] { return model->loss(inputs, labels, options); };
    return sharded != nullptr ? sharded->run(forward) : forward();
  };
}

}  // namespace

Trainer::Loss Assembly::evaluation_loss() { return loss_of(model_, sharded(), /*z_loss=*/0); }

Trainer::Loss Assembly::loss() {
  const TrainSection& train = config_.train;
  if (config_.model.mtp != MtpMode::kTrain) return loss_of(model_, sharded(), train.z_loss);
  return [model = model_, sharded = sharded(), z_loss = train.z_loss, weight = train.mtp_weight](
             const at::Tensor& inputs, const at::Tensor& labels, double divisor) -> Trainer::LossValue {
    models::CausalLM::Losses losses;
    const auto forward = [&] {
      losses = model->losses(inputs, labels, {.z_loss = z_loss, .divisor = divisor});
      return losses.loss + losses.further * weight;
    };
    const at::Tensor sum = sharded != nullptr ? sharded->run(forward) : forward();
    const at::ScalarType type = sum.scalar_type();
    return {sum, losses.loss.detach().to(type), losses.further.detach().to(type)};
  };
}

void Assembly::freeze_further_layers() {
  if (config_.model.mtp != MtpMode::kLoad) return;
  for (const auto& layer : model_->mtp_layers()) {
    for (at::Tensor& parameter : layer->parameters()) parameter.requires_grad_(false);
  }
}

// Mixed precision is a matter of how parameters are held, which shard does, also for one rank.
void Assembly::be_one_rank() {
  alone_ = comm::World::connect(comm::Launch{});
  rank_of_one_.emplace(Ranks{*alone_, mesh_of({}, 1, 0)});
  ranks_ = &*rank_of_one_;
}

void Assembly::load_model(const Input& input) {
  const auto seed = static_cast<uint64_t>(config_.train.seed);
  if (ranks_ != nullptr) {
    model_ = model_without_memory(input.model);
    freeze_further_layers();
    if (config_.lora.on()) adapters_.emplace(*model_, config_.lora, seed);
    comm::World& world = ranks_->world;
    const shard::Options options = shard_options(config_.parallel, config_.train.dtype, world.size());
    sharded_.emplace(
        shard_and_fill(*model_, world.groups(ranks_->mesh), options, device_.c10_device(), config_.model, seed));
    if (adapters_) adapters_->fill(sharded_->shards());
    return;
  }
  const at::TensorOptions options = at::TensorOptions().device(device_.c10_device()).dtype(at::kFloat);
  if (config_.model.init == Init::kRandom) {
    model_ = models::make_model(input.model, options, seed);
  } else {
    model_ = std::make_shared<models::CausalLM>(input.model, options);
    models::load_hf(*model_, config_.model.path);
  }
  freeze_further_layers();
  if (config_.lora.on()) adapters_.emplace(*model_, config_.lora, seed);
}

void Assembly::make_optimizer() {
  std::vector<int64_t> dimensions;  // a piece no longer shows how many its parameter has
  if (sharded_) {
    for (const shard::Shard& shard : sharded_->shards()) {
      dimensions.push_back(static_cast<int64_t>(shard.full_size.size()));
    }
  }
  optimizer_ =
      train::make_optimizer(config_.optim, sharded_ ? sharded_->parameters() : model_->parameters(), dimensions);
}

MemoryUse Assembly::use_of_memory() const {
  const auto parameters = model_ ? model_->parameters() : std::vector<at::Tensor>();
  return memory_use(parameters, optimizer_ ? optimizer_->state_bytes() : Bytes(0), device_);
}

}  // namespace neap::train
