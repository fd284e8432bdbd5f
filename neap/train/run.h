// A whole training run: from a RunConfig to trained parameters and the files that tell about it.
//
//   RunResult result = run(config, {.device = device, .out = std::cout, …});
//
// Everything that can be wrong with the input is found before the first step: UserError. What the run was given from
// outside (device, stop signal, trace) is in Shell, so that nothing here knows about simulators, signals or terminals.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <ostream>
#include <string>

#include "neap/train/config.h"
#include "neap/train/metrics.h"

namespace neap::trace {
class Recorder;
}
namespace neap::train {
struct Ranks;
}

namespace neap::train {

struct Shell {
  c10::Device device = c10::kCPU;
  bool device_has_clock = false;  // its clock is its own (device::set_clock): both times are reported
  std::ostream& out;
  bool terminal = false;
  std::function<bool()> stop_requested;  // asked before each step; empty: never
  trace::Recorder* recorder = nullptr;   // null: no trace
  const Ranks* ranks = nullptr;          // null: one rank, which shards nothing
};

struct RunResult {
  RunSummary summary;
  std::string message;  // why it ended early, for people; empty when it finished
};

// Leaves metrics.jsonl, summary.json, config.yaml and, with a recorder, trace.json in config.log.dir, whatever became
// of the run once its input was found good. With several ranks (collective): rank 0 leaves them, `out` may be silent on
// the others; a rank that runs out of memory leaves the world, and the others end with kRankFailed.
RunResult run(const RunConfig& config, const Shell& shell);

// Does everything but the steps, and prints the configuration and what it amounts to. Writes no file.
RunResult dry_run(const RunConfig& config, const Shell& shell);

}  // namespace neap::train
