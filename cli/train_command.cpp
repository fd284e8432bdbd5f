#include "cli/train_command.h"

#include <unistd.h>

#include <iostream>
#include <optional>

#include "cli/exit_codes.h"
#include "cli/open_device.h"
#include "cli/stop_signal.h"
#include "neap/trace/recorder.h"
#include "neap/train/run.h"

namespace neap::cli {

int train(const TrainArguments& arguments) {
  const train::RunConfig config = train::load_config(arguments.file, arguments.overrides);
  install_stop_signals();
  // The simulator outlives main(), so what it records into must as well.
  static std::optional<trace::Recorder> recorder;
  if (config.log.trace) recorder.emplace();
  trace::Recorder* trace = recorder ? &*recorder : nullptr;

  const OpenDevice opened = open_device(config.device, trace);
  const train::Shell shell{.device = opened.device,
                           .device_has_clock = opened.has_clock,
                           .out = std::cout,
                           .terminal = ::isatty(STDOUT_FILENO) == 1,
                           .stop_requested = [] { return stop_signal() != 0; },
                           .recorder = trace};
  const train::RunResult result = arguments.dry_run ? train::dry_run(config, shell) : train::run(config, shell);
  if (!result.message.empty()) std::cerr << "neap: " << result.message << '\n';
  if (report_hazards(config.device)) return kInternalError;
  switch (result.summary.status) {
    case train::RunStatus::kFinished:
      return kOk;
    case train::RunStatus::kInterrupted:
      return stopped_by(stop_signal());
    case train::RunStatus::kOutOfMemory:
      return kOutOfMemory;
    case train::RunStatus::kNonFinite:
      break;
  }
  return kNonFinite;
}

}  // namespace neap::cli
