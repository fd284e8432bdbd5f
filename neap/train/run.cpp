#include "neap/train/run.h"

#include <chrono>
#include <memory>
#include <optional>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/comm/agreement.h"
#include "neap/comm/failure.h"
#include "neap/comm/world.h"
#include "neap/device/device.h"
#include "neap/files/process_lock.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "neap/shard/fully_shard.h"
#include "neap/trace/chrome_json.h"
#include "neap/train/adapters.h"
#include "neap/train/assembly.h"
#include "neap/train/checkpoints.h"
#include "neap/train/determinism.h"
#include "neap/train/evaluation.h"
#include "neap/train/flops.h"
#include "neap/train/model_directory.h"
#include "neap/train/optimizer.h"
#include "neap/train/parallel.h"
#include "neap/train/progress.h"
#include "neap/train/schema.h"
#include "neap/train/sequences.h"
#include "neap/train/tensorboard_file.h"
#include "neap/train/token_file.h"
#include "neap/train/trainer.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;
using neap::internal::concat;

fs::path export_directory(const RunConfig& config) { return fs::path(config.log.dir) / "hf"; }

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
                fixed(static_cast<double>(assembly.parameter_count()) * 1e-6, 1), " M parameters, float32",
                config.train.dtype == Dtype::kBfloat16 ? ", computing in bfloat16" : "", ") on ", device_name(config));
}

void print_heading(const Input& input, const RunConfig& config, const Shell& shell, Assembly& assembly,
                   const Checkpoints& checkpoints) {
  const TrainSection& train = config.train;
  shell.out << model_line(input, config, assembly) << '\n'
            << "data    " << config.data.path << ": " << input.tokens.size() << " tokens, "
            << input.sequences.per_epoch() << " sequences of " << train.sequence << '\n'
            << "step    ";
  const int64_t ranks = ranks_of(shell);
  if (shell.ranks != nullptr) shell.out << ranks << " ranks × ";
  shell.out << train.accumulation << " × " << train.batch << " × " << train.sequence << " = "
            << ranks * train.accumulation * train.batch * train.sequence << " tokens, " << train.steps << " steps"
            << (operators_are_deterministic() ? ", deterministic operators" : "") << '\n';
  if (shard::Sharded* sharded = assembly.sharded(); sharded != nullptr && shell.ranks != nullptr) {
    shell.out << "ranks   " << shell.ranks->mesh.describe() << ", pieces of " << to_string(sharded->options().stage)
              << ", " << sharded->usage().shards << " of parameters on each\n";
  }
  if (input.model.with_mtp) {
    shell.out << "mtp     " << input.model.mtp_layers << (input.model.mtp_layers == 1 ? " layer" : " layers")
              << " that predict further tokens, "
              << (config.model.mtp == MtpMode::kTrain ? concat("trained with weight ", train.mtp_weight) : "kept as is")
              << '\n';
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
  if (!checkpoints.resume_line().empty()) shell.out << "resume  " << checkpoints.resume_line() << '\n';
  shell.out << "checkpoints " << checkpoints.save_line() << '\n' << std::flush;
}

// Keys that say how something is done which is not done at all.
struct Unused {
  bool now;
  std::vector<const char*> keys;
  const char* why;
};

std::vector<Unused> unused_keys(const RunConfig& config) {
  const std::vector<const char*> adapters = {"lora.alpha", "lora.dropout", "lora.modules"};
  return {
      {!config.lora.on(), adapters, "lora.rank is 0: the whole model is trained, without adapters"},
      {!config.lora.adapter.empty(), adapters, "lora.adapter has its own"},
      {config.data.documents == Documents::kJoined, {"data.end_token"}, "data.documents is joined"},
      {config.model.mtp != MtpMode::kTrain, {"train.mtp_weight"}, "model.mtp is not train"},
      {config.optim.type == OptimType::kSgd, {"optim.betas", "optim.eps"}, "optim.type is sgd"},
      {config.optim.schedule == Schedule::kConstant, {"optim.final_ratio"}, "optim.schedule is constant"},
      {config.device.type != DeviceKind::kSim, {"device.capacity", "device.hazard_check"}, "device.type is not sim"},
      {config.recompute.mode == RecomputeMode::kNone, {"recompute.debug"}, "recompute.mode is none"},
      {config.checkpoint.every == 0,
       {"checkpoint.keep_last", "checkpoint.asynchronous", "checkpoint.host_limit"},
       "checkpoint.every is 0"},
  };
}

bool differs_from_default(const Key& key, const RunConfig& config) { return key.show(config) != key.show(RunConfig{}); }

void warn_of_keys_without_effect(const RunConfig& config, const Shell& shell) {
  if (!writes(shell)) return;
  for (const Unused& unused : unused_keys(config)) {
    for (const char* name : unused.keys) {
      const Key* key = find_key(name);
      NEAP_ASSERT(key != nullptr, name);
      if (unused.now && differs_from_default(*key, config)) log_warning(name, " has no effect: ", unused.why);
    }
  }
  if (shell.ranks == nullptr && config.parallel != ParallelSection{}) {
    for (const Key& key : keys()) {
      if (!key.path.starts_with("parallel.") || !differs_from_default(key, config)) continue;
      if (key.path.ends_with("_dtype") && config.train.dtype != Dtype::kFloat32) continue;
      log_warning(key.path, " has no effect: there is one rank; torchrun starts more");
    }
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

// What the devices of one rank can do in a second; empty: unknown.
std::optional<double> peak_flops(const DeviceSection& device) {
  if (device.peak_flops || device.type != DeviceKind::kSim) return device.peak_flops;
  return device.gflops * 1e9;
}

// Adds to a step what the trainer knows nothing of.
class StepExtras {
 public:
  StepExtras(const RunConfig& config, const Input& input, const Shell& shell, Assembly& assembly)
      : config_(config),
        assembly_(assembly),
        flops_per_token_(flops_per_token(input.model, config.train.sequence, config.lora.on(),
                                         config.model.mtp == MtpMode::kTrain ? input.model.mtp_layers : 0)) {
    if (const auto peak = peak_flops(config.device)) {
      peak_ = *peak * static_cast<double>(ranks_of(shell));
    }
    if (!input.eval_sequences) return;
    evaluation_.emplace(Evaluation::Parts{.model = &assembly.state().model,
                                          .loss = assembly.evaluation_loss(),
                                          .sequences = *input.eval_sequences,
                                          .device = assembly.device(),
                                          .world = assembly.world(),
                                          .sharded = assembly.sharded()},
                        config.train);
  }

  void add_to(StepMetrics& metrics) {
    const double seconds = metrics.device_step_ms.value_or(metrics.step_ms) * 1e-3;
    if (peak_ && seconds > 0) {
      metrics.mfu = flops_per_token_ * static_cast<double>(metrics.tokens) / seconds / *peak_;
    }
    const int64_t every = config_.train.eval_every;
    const bool due = metrics.step == config_.train.steps || (every > 0 && metrics.step % every == 0);
    if (!evaluation_ || !due) return;
    const auto begin = std::chrono::steady_clock::now();
    assembly_.guarded(concat("the evaluation after step ", metrics.step),
                      [&] { metrics.eval_loss = evaluation_->loss(); });
    metrics.eval_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  const RunConfig& config_;
  Assembly& assembly_;
  const double flops_per_token_;
  std::optional<double> peak_;
  std::optional<Evaluation> evaluation_;
};

Trainer::Parts trainer_parts(const RunConfig& config, const Shell& shell, Assembly& assembly, const Input& input,
                             Taken start) {
  return {.loss = assembly.loss(),
          .sequences = input.sequences,
          .optimizer = assembly.optimizer(),
          .frozen = assembly.frozen_parameters(),
          .rate = LearningRate(config.optim, config.train.steps),
          .device = assembly.device(),
          .engine = assembly.engine(),
          .recompute = assembly.recompute(),
          .experts = assembly.experts(),
          .recorder = shell.recorder,
          .device_has_clock = shell.device_has_clock,
          .world = assembly.world(),
          .sharded = assembly.sharded(),
          .stop_requested = shell.stop_requested,
          .steps_done = start.steps,
          .sequences_done = start.sequences};
}

void take_steps(const RunConfig& config, const Shell& shell, const fs::path& dir, Assembly& assembly,
                const Input& input, Checkpoints& checkpoints, RunSummary& summary) {
  std::optional<MetricsFile> metrics_file;
  std::optional<TensorBoardFile> events;
  if (writes(shell)) metrics_file.emplace(dir / "metrics.jsonl", checkpoints.start().steps);
  if (writes(shell) && config.log.tensorboard) events.emplace(dir, checkpoints.start().steps);
  Trainer trainer(trainer_parts(config, shell, assembly, input, checkpoints.start()), config.train, config.optim.clip);
  const auto taken = [&] { return Taken{.steps = trainer.steps_done(), .sequences = trainer.sequences_done()}; };
  StepExtras extras(config, input, shell, assembly);
  Progress progress(shell.out, shell.terminal, config.train.steps);
  // Several ranks have to stop at the same step.
  const auto stops = [&] {
    return shell.ranks != nullptr ? trainer.stop_agreed() : shell.stop_requested && shell.stop_requested();
  };
  while (trainer.steps_done() < config.train.steps) {
    if (stops()) {
      summary.status = RunStatus::kInterrupted;
      break;
    }
    StepMetrics metrics = trainer.step();
    extras.add_to(metrics);
    if (metrics_file) metrics_file->write(metrics);
    if (events) events->scalars(metrics.step, scalars(metrics));
    progress.step(metrics);
    if (metrics.device_peak) summary.peak = std::max(summary.peak.value_or(Bytes(0)), *metrics.device_peak);
    summary.steps.push_back(metrics);
    checkpoints.after_step(assembly.state(), taken());
  }
  checkpoints.finish(assembly.state(), taken());
}

// What the steps before the end of a run have begun to save is not lost with it, unless other ranks are in the dark.
void take_steps_and_keep(const RunConfig& config, const Shell& shell, const fs::path& dir, Assembly& assembly,
                         const Input& input, Checkpoints& checkpoints, RunSummary& summary) {
  try {
    take_steps(config, shell, dir, assembly, input, checkpoints, summary);
  } catch (const NonFiniteError&) {  // of every rank
    checkpoints.complete();
    throw;
  } catch (...) {
    if (shell.ranks == nullptr) checkpoints.complete();
    throw;
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

// Held as long as the run writes. Before its checkpoints are looked for: another process may be making some.
std::unique_ptr<files::ProcessLock> claim_run_directory(const RunConfig& config, const Shell& shell) {
  std::unique_ptr<files::ProcessLock> lock;
  comm::together(world_of(shell), "log.dir", [&] {
    if (!writes(shell)) return;
    const fs::path dir = config.log.dir;
    std::error_code status, ignored;
    fs::create_directories(dir, status);
    NEAP_CHECK(fs::is_directory(dir, ignored), "[log.dir] ", dir.string(), " cannot be made: ", status.message());
    lock = std::make_unique<files::ProcessLock>(dir, "run.lock", "log.dir");
  });
  return lock;
}

fs::path begin_run_directory(const RunConfig& config, bool resumed) {
  const fs::path dir = config.log.dir;
  std::error_code status;
  // What an earlier run left would be mistaken for this one's.
  for (const char* name : {"summary.json", "trace.json"}) fs::remove(dir / name, status);
  if (!resumed) {
    fs::remove(dir / "metrics.jsonl", status);
    for (const auto& entry : fs::directory_iterator(dir, status)) {
      if (entry.path().filename().string().starts_with("events.out.tfevents.")) fs::remove(entry.path(), status);
    }
  }
  write_file(dir / "config.yaml", to_yaml(config));
  return dir;
}

void check_export(const RunConfig& config) {
  std::error_code status;
  const fs::path target = export_directory(config);
  NEAP_CHECK(!config.checkpoint.export_model || !fs::equivalent(target, config.model.path, status),
             "[checkpoint.export] the trained model would replace ", config.model.path,
             ", which it is made from; choose another log.dir");
}

RunConfig checked(const RunConfig& given, const Shell& shell) {
  RunConfig config = resolve(given, ranks_of(shell));
  warn_of_keys_without_effect(config, shell);
  set_deterministic(config.train.deterministic);
  return config;
}

// What there is of a run before anything is made for it: all that a run file can have wrong is found here.
struct Beginning {
  enum class Writes { kNothing, kRunDirectory };

  Beginning(const RunConfig& given, const Shell& shell, Writes writes) : begun(checked(given, shell)), input(begun) {
    check_export(begun);
    if (writes == Writes::kRunDirectory) lock = claim_run_directory(begun, shell);
    begun.train.tokens = given.train.tokens;  // those that are left make other steps
    checkpoints.emplace(begun, input.model.to_json(), input.sequences, world_of(shell), input.description());
  }

  RunConfig begun;  // the run's own is that of its checkpoints
  std::unique_ptr<files::ProcessLock> lock;
  const Input input;
  std::optional<Checkpoints> checkpoints;  // there once the constructor is through
};

}  // namespace

RunResult run(const RunConfig& given, const Shell& shell) {
  Beginning beginning(given, shell, Beginning::Writes::kRunDirectory);
  const Input& input = beginning.input;
  Checkpoints& checkpoints = *beginning.checkpoints;
  const RunConfig& config = checkpoints.config();
  const bool resumed = checkpoints.start().steps > 0;
  const fs::path dir = writes(shell) ? begin_run_directory(config, resumed) : fs::path(config.log.dir);
  RunResult result = with_status(config, shell, [&](RunResult& current) {
    Assembly assembly(config, input, shell);
    checkpoints.restore(assembly.state());
    print_heading(input, config, shell, assembly, checkpoints);
    take_steps_and_keep(config, shell, dir, assembly, input, checkpoints, current.summary);
    assembly.device().synchronize();
    const ModelState state = assembly.state();
    if (config.checkpoint.export_model && current.summary.status == RunStatus::kFinished) {
      if (writes(shell)) warn_of_export(export_directory(config), input.model, config.lora.on());
      write_model({export_directory(config), input.model, config.model.path}, state.model, state.sharded,
                  world_of(shell));
    }
    if (const Adapters* adapters = assembly.adapters()) {
      adapters->save(dir / "adapter", config.model.path, state.sharded, writes(shell));
    }
  });
  if (!writes(shell)) return result;
  write_file(dir / "summary.json", to_json(result.summary, result.message));
  if (shell.recorder != nullptr) {
    write_file(dir / "trace.json", [&](std::ostream& out) { trace::write_chrome_json(*shell.recorder, out); });
  }
  shell.out << '\n' << final_table(result.summary) << table_row("files", dir.string()) << std::flush;
  return result;
}

RunResult dry_run(const RunConfig& given, const Shell& shell) {
  Beginning beginning(given, shell, Beginning::Writes::kNothing);
  const Input& input = beginning.input;
  Checkpoints& checkpoints = *beginning.checkpoints;
  const RunConfig& config = checkpoints.config();
  return with_status(config, shell, [&](RunResult& /*current*/) {
    Assembly assembly(config, input, shell);
    checkpoints.restore(assembly.state());
    shell.out << to_yaml(config) << '\n';
    print_heading(input, config, shell, assembly, checkpoints);
  });
}

}  // namespace neap::train
