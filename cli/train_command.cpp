#include "cli/train_command.h"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <optional>

#include "cli/exit_codes.h"
#include "cli/open_device.h"
#include "cli/rank_label.h"
#include "cli/stop_signal.h"
#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/comm/launch.h"
#include "neap/comm/world.h"
#include "neap/trace/recorder.h"
#include "neap/train/parallel.h"
#include "neap/train/run.h"

namespace neap::cli {

namespace {

using train::RunConfig;
using train::RunStatus;

int exit_code(RunStatus status) {
  switch (status) {
    case RunStatus::kFinished:
      return kOk;
    case RunStatus::kInterrupted:
      // No signal of its own: it stopped because another rank did.
      return stopped_by(stop_signal() != 0 ? stop_signal() : SIGTERM);
    case RunStatus::kOutOfMemory:
      return kOutOfMemory;
    case RunStatus::kRankFailed:
      return kRankFailed;
    case RunStatus::kNonFinite:
      break;
  }
  return kNonFinite;
}

// `device`: that of the run file, or this rank's own.
int train_here(const RunConfig& config, const train::DeviceSection& device, bool dry_run, const train::Ranks* ranks,
               trace::Recorder* recorder) {
  install_stop_signals();
  const bool first = ranks == nullptr || ranks->world.rank() == 0;
  std::ostream nowhere(nullptr);
  const OpenDevice opened = open_device(device, recorder);
  if (ranks != nullptr) {
    train::check_same_config(ranks->world, config);
    if (first && opened.device.is_cuda()) {
      log_warning("[device.type] several ranks on cuda exchange tensors over NCCL, a path that was compiled and never ",
                  "run; compare the first losses with those of one process");
    }
  }
  const train::Shell shell{.device = opened.device,
                           .device_has_clock = opened.has_clock,
                           .out = first ? std::cout : nowhere,
                           .terminal = first && ::isatty(STDOUT_FILENO) == 1,
                           .stop_requested = [] { return stop_signal() != 0; },
                           .recorder = recorder,
                           .ranks = ranks};
  const train::RunResult result = dry_run ? train::dry_run(config, shell) : train::run(config, shell);
  if (!result.message.empty()) std::cerr << "neap: " + rank_label() + result.message + '\n';
  if (report_hazards(config.device)) return kInternalError;
  return exit_code(result.summary.status);
}

int train_among_ranks(const RunConfig& config, bool dry_run, const comm::Launch& launch, trace::Recorder* recorder) {
  const comm::Mesh mesh = train::mesh_of(config.parallel, launch.world, launch.rank);
  comm::WorldOptions options;
  options.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::nanoseconds(config.parallel.timeout_ns));
  options.recorder = recorder;
  options.clock = trace_clock(config.device);
  const auto world = comm::World::connect(launch, options);
  train::DeviceSection device = config.device;
  // A process of its own has a simulator of its own; of CUDA's devices each rank of a host takes the next.
  if (device.type == train::DeviceKind::kCuda) device.index += launch.local_rank;
  try {
    const train::Ranks ranks{*world, mesh};
    const int code = train_here(config, device, dry_run, &ranks, recorder);
    // Otherwise there is nobody to part from: the world has been told already.
    if (code != kOutOfMemory && code != kRankFailed) world->close();
    return code;
  } catch (const std::exception& error) {
    world->abandon(error.what());
    throw;
  }
}

}  // namespace

int train(const TrainArguments& arguments) {
  const RunConfig config = train::load_config(arguments.file, arguments.overrides);
  const comm::Launch launch = comm::Launch::from_environment();
  // The simulator outlives main(), so what it records into must as well.
  static std::optional<trace::Recorder> recorder;
  if (config.log.trace && launch.rank == 0) recorder.emplace();
  trace::Recorder* trace = recorder ? &*recorder : nullptr;
  return launch.world == 1 ? train_here(config, config.device, arguments.dry_run, nullptr, trace)
                           : train_among_ranks(config, arguments.dry_run, launch, trace);
}

}  // namespace neap::cli
