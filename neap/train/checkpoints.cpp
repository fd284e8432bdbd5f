#include "neap/train/checkpoints.h"

#include <ATen/Context.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "neap/base/error.h"
#include "neap/checkpoint/directory.h"
#include "neap/comm/agreement.h"
#include "neap/comm/world.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/resumption.h"
#include "neap/train/schema.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;
using checkpoint::Piece;
using neap::internal::concat;

constexpr const char* kNone = "none";
constexpr const char* kAuto = "auto";

std::vector<Piece> parameters_of(const ModelState& state) {
  std::vector<Piece> pieces;
  if (state.sharded != nullptr) {
    for (shard::Shard& shard : state.sharded->shards()) {
      pieces.push_back(
          {kParameterPrefix + shard.name, std::move(shard.full_size), shard.begin, shard.end, shard.data.detach()});
    }
    return pieces;
  }
  std::set<const void*> seen;  // a tied parameter is saved under its first name
  for (const auto& item : state.model.named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    pieces.push_back(checkpoint::whole(kParameterPrefix + item.key(), item.value()));
  }
  return pieces;
}

// Names by which the optimizer's parameters are known.
std::map<const void*, std::size_t> places_of(const ModelState& state) {
  std::map<const void*, std::size_t> places;
  if (state.sharded != nullptr) {
    for (const at::Tensor& parameter : state.sharded->parameters()) {
      places.emplace(parameter.unsafeGetTensorImpl(), places.size());
    }
    return places;
  }
  for (const auto& item : state.model.named_parameters()) {
    places.emplace(item.value().unsafeGetTensorImpl(), places.size());
  }
  return places;
}

// Parameters, what the optimizer remembers of them, and buffers, as views of what they are.
std::vector<Piece> pieces_of(const ModelState& state) {
  std::vector<Piece> pieces = parameters_of(state);
  const std::map<const void*, std::size_t> places = places_of(state);
  const Optimizer& optimizer = state.optimizer;
  for (std::size_t i = 0; i < optimizer.parameters().size(); ++i) {
    const Piece parameter = pieces.at(places.at(optimizer.parameters()[i].unsafeGetTensorImpl()));
    const std::string name = parameter.name.substr(std::char_traits<char>::length(kParameterPrefix));
    for (const auto& [what, values] : optimizer.state_of(i)) {
      std::string key = concat("optimizer.", what, '.', name);
      if (values.dim() == 0) {  // a number; also the only element of a scalar parameter's moments
        pieces.push_back(checkpoint::whole(std::move(key), values));
      } else {
        pieces.push_back({std::move(key), parameter.full_size, parameter.begin, parameter.end, values.view({-1})});
      }
    }
  }
  // Every rank has them whole, and the same.
  for (const auto& item : state.model.named_buffers()) {
    pieces.push_back(checkpoint::whole(kBufferPrefix + item.key(), item.value()));
  }
  return pieces;
}

// The generators that operators draw from when they are given none: of the CPU, and of the device.
std::vector<std::pair<std::string, at::Generator>> generators_of(c10::Device device) {
  std::vector<std::pair<std::string, at::Generator>> out;
  out.emplace_back("cpu", at::globalContext().defaultGenerator(c10::kCPU));
  if (!device.is_cpu()) {
    out.emplace_back(c10::DeviceTypeName(device.type(), /*lower_case=*/true),
                     at::globalContext().defaultGenerator(device));
  }
  return out;
}

constexpr const char* kRankPrefix = "rank.";
std::string generator_name(int rank, const std::string& device) {
  return concat(kRankPrefix, rank, ".generator.", device);
}

bool belongs_to_a_rank(const std::string& name) { return name.starts_with(kRankPrefix); }

int64_t number_of(const checkpoint::Reader& reader, const std::string& key) {
  const std::string& text = reader.state(key);
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  NEAP_CHECK(error == std::errc() && end == text.data() + text.size() && value >= 0, "[checkpoint] ",
             reader.dir().string(), ": expected a number as '", key, "'; found '", text, "'");
  return value;
}

}  // namespace

fs::path checkpoint_directory(const RunConfig& config) {
  return config.checkpoint.dir.empty() ? fs::path(config.log.dir) / "checkpoints" : fs::path(config.checkpoint.dir);
}

Checkpoints::Checkpoints(const RunConfig& config, std::string model, const Sequences& sequences, comm::World* world,
                         checkpoint::State more)
    : config_(config),
      options_(config.checkpoint),
      dir_(checkpoint_directory(config)),
      world_(world),
      description_{{"data", fingerprint(sequences)}, {"model", std::move(model)}},
      saver_(
          dir_,
          {.keep_last = options_.keep_last, .asynchronous = options_.asynchronous, .host_limit = options_.host_limit},
          world) {
  description_.merge(more);
  std::string path;
  comm::together(world, "checkpoint.resume", [&] {
    if (comm::rank_of(world_) == 0) path = find().value_or("").string();
  });
  path = comm::exchange_texts(world, path, "checkpoint.resume").front();
  if (path.empty()) {
    if (options_.resume == kAuto) resume_line_ = concat("nothing in ", dir_.string(), " yet: from the beginning");
  } else {
    comm::together(world, "checkpoint.resume", [&] { open(path); });
    resume_line_ = concat(path, ", after step ", start_.steps);
  }
  comm::together(world, "checkpoint.dir", [&] { check_directory(); });
  if (!reader_) config_ = resolve(config_, comm::size_of(world_));
  description_["config"] = to_yaml(config_);
}

std::optional<fs::path> Checkpoints::find() const {
  if (options_.resume == kNone) return std::nullopt;
  if (options_.resume == kAuto) return checkpoint::newest_checkpoint(dir_);
  return checkpoint::checkpoint_at(options_.resume);
}

void Checkpoints::open(const fs::path& path) {
  reader_.emplace(path);
  const std::string index = (path / checkpoint::kIndexName).string();
  check_unchanged(config_, reader_->state("config"), index);
  NEAP_CHECK(reader_->state("model") == description_.at("model"), "[model.path] the model of ", config_.model.path,
             " is not the one that ", index, " is a checkpoint of; they were configured as\n", description_.at("model"),
             "\nand\n", reader_->state("model"));
  check_same_adapters(description_, reader_->index().state, config_.lora, index);
  NEAP_CHECK(reader_->state("data") == description_.at("data"), "[data.path] ", config_.data.path,
             " does not hold the data that ", index,
             " was trained on; a resumed run goes on in the same data, checkpoint.resume: none begins another one");
  start_ = {.steps = number_of(*reader_, "step"), .sequences = number_of(*reader_, "sequences")};
  saved_ = start_.steps;
  const int64_t length = config_.train.sequence;
  const int64_t counted = std::min(start_.sequences, std::numeric_limits<int64_t>::max() / length);
  config_ = resolve(config_, comm::size_of(world_), {start_.steps, counted * length});
  NEAP_CHECK(start_.steps <= config_.train.steps, "[train.steps] expected at least ", start_.steps, ", after which ",
             index, " was made; found ", config_.train.steps);
}

// What an earlier run has left would be taken for this one's by the next resume: auto.
void Checkpoints::check_directory() const {
  if (options_.every == 0) return;
  const auto newest = checkpoint::newest_checkpoint(dir_);
  if (!newest) return;
  NEAP_CHECK(reader_.has_value(), "[checkpoint.dir] ", newest->string(),
             " is of an earlier run; checkpoint.resume: auto goes on from it; else choose another directory");
  NEAP_CHECK(checkpoint::step_of(*newest) <= start_.steps, "[checkpoint.dir] expected no checkpoint after step ",
             start_.steps, ", from which this run goes on; found ", newest->string(),
             "; remove it, or choose another directory");
}

std::string Checkpoints::save_line() const {
  if (options_.every == 0) return "none: the state of the run is not kept (checkpoint.every)";
  return concat("every ", options_.every, options_.every == 1 ? " step" : " steps", " and at the end, in ",
                dir_.string());
}

void Checkpoints::restore(const ModelState& state) {
  if (!reader_) return;
  checkpoint::load(*reader_, pieces_of(state), world_, belongs_to_a_rank);
  comm::together(world_, "generators", [&] {
    const int rank = comm::rank_of(world_) % reader_->index().world;
    for (auto& [device, generator] : generators_of(state.device)) {
      const std::string name = generator_name(rank, device);
      if (!reader_->index().tensors.contains(name)) continue;  // the run was on another kind of device
      const at::Tensor saved = reader_->tensor(name);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(saved);
    }
  });
  reader_.reset();
}

void Checkpoints::save(const ModelState& state, Taken taken) {
  std::vector<Piece> pieces = pieces_of(state);
  for (auto& [device, generator] : generators_of(state.device)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    pieces.push_back(checkpoint::whole(generator_name(comm::rank_of(world_), device), generator.get_state()));
  }
  checkpoint::State description = description_;
  description["step"] = std::to_string(taken.steps);
  description["sequences"] = std::to_string(taken.sequences);
  saver_.save(taken.steps, pieces, std::move(description));
  saved_ = taken.steps;
}

void Checkpoints::after_step(const ModelState& state, Taken taken) {
  saver_.poll();
  if (options_.every > 0 && taken.steps % options_.every == 0) save(state, taken);
}

void Checkpoints::finish(const ModelState& state, Taken taken) {
  if (options_.every > 0 && taken.steps > saved_) save(state, taken);
  saver_.finish();
}

}  // namespace neap::train
