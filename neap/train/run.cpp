#include "neap/train/run.h"

#include <c10/util/accumulate.h>

#include <fstream>
#include <memory>
#include <optional>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/comm/failure.h"
#include "neap/comm/world.h"
#include "neap/device/device.h"
#include "neap/models/causal_lm.h"
#include "neap/models/hugging_face.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "neap/shard/fully_shard.h"
#include "neap/trace/chrome_json.h"
#include "neap/train/adamw.h"
#include "neap/train/adapters.h"
#include "neap/train/parallel.h"
#include "neap/train/progress.h"
#include "neap/train/schema.h"
#include "neap/train/sequences.h"
#include "neap/train/token_file.h"
#include "neap/train/trainer.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;
using neap::internal::concat;

// The input, looked at before anything large is allocated.
struct Input {
  models::LlamaConfig model;
  TokenFile tokens;
  Sequences sequences;

  explicit Input(const RunConfig& config)
      : model(models::LlamaConfig::from_file(fs::path(config.model.path) / "config.json")),
        tokens(TokenFile::open(config.data.path, config.data.format, config.data.token_type)),
        sequences(tokens, {.length = config.train.sequence,
                           .shuffle = config.data.shuffle,
                           .seed = static_cast<uint64_t>(config.train.seed)}) {
    NEAP_CHECK(config.train.sequence <= model.max_position_embeddings, "[train.sequence] expected at most ",
               model.max_position_embeddings, ", the model's max_position_embeddings; found ", config.train.sequence);
    tokens.check_vocabulary(model.vocab_size);
  }
};

template <class Section>
std::vector<std::string> patterns_of(const Section& section) {
  std::vector<std::string> patterns = section.modules;
  patterns.insert(patterns.end(), section.layers.begin(), section.layers.end());
  return patterns;
}

bool writes(const Shell& shell) { return shell.ranks == nullptr || shell.ranks->world.rank() == 0; }

// What lies on the device for the whole run.
class Assembly {
 public:
  Assembly(const RunConfig& config, const Input& input, const Shell& shell)
      : config_(config), device_(device::Device::of(shell.device)) {
    guarded("loading the model", [&] { load_model(input); });
    if (config.lora.on()) adapters_.emplace(*model_, config.lora, static_cast<uint64_t>(config.train.seed));
    if (shell.ranks != nullptr) {
      comm::World& world = shell.ranks->world;
      guarded("sharding the model", [&] {
        sharded_.emplace(
            shard::fully_shard(*model_, world.groups(shell.ranks->mesh), shard_options(config.parallel, world.size())));
      });
    }
    if (config.offload.options.mode != offload::Mode::kOff) {
      engine_.emplace(config.offload.options, offload::Resources{.pool = nullptr, .recorder = shell.recorder});
      engine_->attach(*model_, patterns_of(config.offload));
    }
    if (config.recompute.mode != RecomputeMode::kNone) {
      recompute_.emplace(config.recompute.options, shell.recorder);
      recompute_->attach(*model_, patterns_of(config.recompute));
    }
    guarded("allocating the optimizer's state", [&] { make_optimizer(); });
    // A rank that could not get here is missed now, not by a collective of a device, which waits for it to connect.
    if (shell.ranks != nullptr) shell.ranks->world.all().barrier("the model").wait();
  }

  device::Device& device() { return device_; }
  AdamW& optimizer() { return *optimizer_; }
  offload::Engine* engine() { return engine_ ? &*engine_ : nullptr; }
  recompute::Recompute* recompute() { return recompute_ ? &*recompute_ : nullptr; }
  shard::Sharded* sharded() { return sharded_ ? &*sharded_ : nullptr; }
  std::vector<at::Tensor> frozen_parameters() const {
    std::vector<at::Tensor> frozen;
    for (const at::Tensor& parameter : model_->parameters()) {
      if (!parameter.requires_grad()) frozen.push_back(parameter);
    }
    return frozen;
  }
  const Adapters* adapters() const { return adapters_ ? &*adapters_ : nullptr; }
  // Of the whole model.
  int64_t parameter_count() {
    int64_t count = 0;
    if (!sharded_) {
      for (const at::Tensor& parameter : model_->parameters()) count += parameter.numel();
      return count;
    }
    for (const shard::Shard& shard : sharded_->shards()) count += c10::multiply_integers(shard.full_size);
    return count;
  }
  Trainer::Loss loss() {
    return [model = model_, sharded = sharded()](const at::Tensor& inputs, const at::Tensor& labels, double divisor) {
      models::LossOptions options;
      options.divisor = divisor;
      const auto forward = [&] { return model->loss(inputs, labels, options); };
      return sharded != nullptr ? sharded->run(forward) : forward();
    };
  }

 private:
  void load_model(const Input& input) {
    const at::TensorOptions options = at::TensorOptions().device(device_.c10_device()).dtype(at::kFloat);
    model_ = config_.model.init == Init::kRandom
                 ? models::make_llama(input.model, options, static_cast<uint64_t>(config_.train.seed))
                 : models::model_from_hf(config_.model.path, options);
  }

  void make_optimizer() {
    std::vector<int64_t> dimensions;  // a piece no longer shows how many its parameter has
    if (sharded_) {
      for (const shard::Shard& shard : sharded_->shards()) {
        dimensions.push_back(static_cast<int64_t>(shard.full_size.size()));
      }
    }
    const OptimSection& optim = config_.optim;
    const AdamW::Options options{.beta1 = optim.betas[0],
                                 .beta2 = optim.betas[1],
                                 .eps = optim.eps,
                                 .weight_decay = optim.weight_decay,
                                 .decay = optim.decay};
    optimizer_ = std::make_unique<AdamW>(sharded_ ? sharded_->parameters() : model_->parameters(), options, dimensions);
  }

  template <class Function>
  void guarded(const char* when, Function&& function) {
    device_.reset_peak();
    try {
      function();
    } catch (const std::exception& error) {
      const auto reason = out_of_memory_text(error);
      if (!reason) throw;
      const auto parameters = model_ ? model_->parameters() : std::vector<at::Tensor>();
      throw DeviceOutOfMemory({.when = when, .reason = *reason, .use = memory_use(parameters, Bytes(0), device_)});
    }
  }

  const RunConfig& config_;
  device::Device& device_;
  std::shared_ptr<models::CausalLM> model_;
  std::optional<Adapters> adapters_;
  std::optional<shard::Sharded> sharded_;
  std::optional<offload::Engine> engine_;
  std::optional<recompute::Recompute> recompute_;
  std::unique_ptr<AdamW> optimizer_;
};

std::string device_name(const RunConfig& config) {
  const DeviceSection& device = config.device;
  const std::string index = ":" + std::to_string(device.index);
  switch (device.type) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return "cuda" + index;
    case DeviceKind::kSim:
      break;
  }
  return concat("sim", index, ", capacity ", device.capacity ? to_string(*device.capacity) : "unlimited");
}

std::string model_line(const Input& input, const RunConfig& config, Assembly& assembly) {
  return concat("model   ", config.model.path, " (", input.model.architecture(), ", ",
                fixed(static_cast<double>(assembly.parameter_count()) * 1e-6, 1), " M parameters, float32) on ",
                device_name(config));
}

void print_heading(const Input& input, const RunConfig& config, const Shell& shell, Assembly& assembly) {
  const TrainSection& train = config.train;
  shell.out << model_line(input, config, assembly) << '\n'
            << "data    " << config.data.path << ": " << input.tokens.size() << " tokens, "
            << input.sequences.per_epoch() << " sequences of " << train.sequence << '\n'
            << "step    ";
  int64_t ranks = 1;
  if (shell.ranks != nullptr) {
    ranks = shell.ranks->mesh.world();
    shell.out << ranks << " ranks × ";
  }
  shell.out << train.accumulation << " × " << train.batch << " × " << train.sequence << " = "
            << ranks * train.accumulation * train.batch * train.sequence << " tokens, " << train.steps << " steps\n";
  if (shard::Sharded* sharded = assembly.sharded()) {
    shell.out << "ranks   " << shell.ranks->mesh.describe() << ", pieces of " << to_string(sharded->options().stage)
              << ", " << sharded->usage().shards << " of parameters on each\n";
  }
  if (const Adapters* adapters = assembly.adapters()) shell.out << "lora    " << adapters->describe() << '\n';
  if (offload::Engine* engine = assembly.engine()) {
    const auto units = engine->unit_names();
    shell.out << "offload " << to_string(engine->options().mode) << ", " << units.size() << " units (" << units.front()
              << " … " << units.back() << "), prefetch " << to_string(engine->options().prefetch) << '\n';
  } else {
    shell.out << "offload off\n";
  }
  if (recompute::Recompute* recompute = assembly.recompute()) {
    const auto units = recompute->unit_names();
    shell.out << "recompute " << units.size() << " units (" << units.front() << " … " << units.back() << ")\n";
  }
  shell.out << std::flush;
}

void warn_of_keys_without_effect(const RunConfig& config, const Shell& shell) {
  if (!writes(shell)) return;
  if (shell.ranks == nullptr && config.parallel != ParallelSection{}) {
    for (const Key& key : keys()) {
      if (!key.path.starts_with("parallel.") || key.show(config) == key.show(RunConfig{})) continue;
      log_warning(key.path, " has no effect: there is one rank; torchrun starts more");
    }
  }
  if (config.device.type != DeviceKind::kSim && config.device.capacity) {
    log_warning("device.capacity has no effect: device.type is not sim");
  }
  if (config.device.type == DeviceKind::kCpu && config.offload.options.mode != offload::Mode::kOff) {
    log_warning("offload.mode: ", to_string(config.offload.options.mode),
                " saves no memory: device.type is cpu, whose ",
                "activations only move to other memory of the same host");
  }
  if (config.offload.options.mode == offload::Mode::kOff && !patterns_of(config.offload).empty()) {
    log_warning("offload.modules and offload.layers have no effect: offload.mode is off");
  }
  if (config.recompute.mode == RecomputeMode::kNone && !patterns_of(config.recompute).empty()) {
    log_warning("recompute.modules and recompute.layers have no effect: recompute.mode is none");
  }
}

std::optional<Bytes> capacity_of(const RunConfig& config, const device::Device& device) {
  if (config.device.type == DeviceKind::kSim) return config.device.capacity;
  const auto capacity = device.capacity();
  return capacity ? std::optional(capacity->total) : std::nullopt;
}

void take_steps(const RunConfig& config, const Shell& shell, const fs::path& dir, Assembly& assembly,
                const Input& input, RunSummary& summary) {
  std::optional<MetricsFile> metrics_file;
  if (writes(shell)) metrics_file.emplace(dir / "metrics.jsonl");
  Trainer trainer({.loss = assembly.loss(),
                   .sequences = input.sequences,
                   .optimizer = assembly.optimizer(),
                   .frozen = assembly.frozen_parameters(),
                   .rate = LearningRate(config.optim, config.train.steps),
                   .device = assembly.device(),
                   .engine = assembly.engine(),
                   .recompute = assembly.recompute(),
                   .recorder = shell.recorder,
                   .device_has_clock = shell.device_has_clock,
                   .world = shell.ranks != nullptr ? &shell.ranks->world : nullptr,
                   .sharded = assembly.sharded(),
                   .stop_requested = shell.stop_requested},
                  config.train, config.optim.clip);
  Progress progress(shell.out, shell.terminal, config.train.steps);
  // Several ranks have to stop at the same step.
  const auto stops = [&] {
    return shell.ranks != nullptr ? trainer.stop_agreed() : shell.stop_requested && shell.stop_requested();
  };
  for (int64_t step = 0; step < config.train.steps; ++step) {
    if (stops()) {
      summary.status = RunStatus::kInterrupted;
      return;
    }
    const StepMetrics metrics = trainer.step();
    if (metrics_file) metrics_file->write(metrics);
    progress.step(metrics);
    if (metrics.device_peak) summary.peak = std::max(summary.peak.value_or(Bytes(0)), *metrics.device_peak);
    summary.steps.push_back(metrics);
  }
}

RunSummary new_summary(const RunConfig& config, const Shell& shell) {
  RunSummary summary;
  const fs::path dir = config.log.dir;
  summary.name = (dir.has_filename() ? dir : dir.parent_path()).filename().string();
  summary.capacity = capacity_of(config, device::Device::of(shell.device));
  return summary;
}

// Everything about one run that ends in a status rather than in an exception.
template <class Function>
RunResult with_status(const RunConfig& config, const Shell& shell, Function&& function) {
  RunResult result{.summary = new_summary(config, shell), .message = ""};
  try {
    function(result);
  } catch (const DeviceOutOfMemory& error) {
    if (shell.ranks != nullptr) shell.ranks->world.abandon(concat("out of memory in ", error.shortage().when));
    result.summary.status = RunStatus::kOutOfMemory;
    const auto& peak = error.shortage().use.peak;
    if (peak) result.summary.peak = std::max(result.summary.peak.value_or(Bytes(0)), *peak);
    result.message = describe(error.shortage(), config);
  } catch (const NonFiniteError& error) {
    result.summary.status = RunStatus::kNonFinite;
    result.message = error.what();
  } catch (const comm::RankFailure& error) {
    result.summary.status = RunStatus::kRankFailed;
    result.message = error.what();
  }
  return result;
}

fs::path make_run_directory(const RunConfig& config) {
  const fs::path dir = config.log.dir;
  std::error_code status;
  fs::create_directories(dir, status);
  NEAP_CHECK(fs::is_directory(dir), "[log.dir] ", dir.string(), " cannot be made: ", status.message());
  // What an earlier run left would be mistaken for this one's.
  for (const char* name : {"metrics.jsonl", "summary.json", "trace.json"}) fs::remove(dir / name, status);
  write_file(dir / "config.yaml", to_yaml(config));
  return dir;
}

}  // namespace

RunResult run(const RunConfig& config, const Shell& shell) {
  warn_of_keys_without_effect(config, shell);
  const Input input(config);
  const fs::path dir = writes(shell) ? make_run_directory(config) : fs::path(config.log.dir);
  RunResult result = with_status(config, shell, [&](RunResult& current) {
    Assembly assembly(config, input, shell);
    print_heading(input, config, shell, assembly);
    take_steps(config, shell, dir, assembly, input, current.summary);
    assembly.device().synchronize();
    if (const Adapters* adapters = assembly.adapters()) {
      adapters->save(dir / "adapter", config.model.path, assembly.sharded(), writes(shell));
    }
  });
  if (!writes(shell)) return result;
  write_file(dir / "summary.json", to_json(result.summary));
  if (shell.recorder != nullptr) {
    std::ofstream trace(dir / "trace.json", std::ios::binary);
    trace::write_chrome_json(*shell.recorder, trace);
    NEAP_CHECK(trace.good(), "[log.dir] ", (dir / "trace.json").string(), " cannot be written");
  }
  shell.out << '\n' << final_table(result.summary) << table_row("files", dir.string()) << std::flush;
  return result;
}

RunResult dry_run(const RunConfig& config, const Shell& shell) {
  warn_of_keys_without_effect(config, shell);
  const Input input(config);
  return with_status(config, shell, [&](RunResult& /*current*/) {
    Assembly assembly(config, input, shell);
    shell.out << to_yaml(config) << '\n';
    print_heading(input, config, shell, assembly);
  });
}

}  // namespace neap::train
