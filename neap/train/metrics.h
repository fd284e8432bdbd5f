// torch-free
// What one step measured, and the files a run leaves behind: metrics.jsonl, one object a line, and summary.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "neap/base/bytes.h"

namespace neap::train {

// What the device held when it was fullest. The model's state is known to the byte; of the rest, activations are what
// lay there at rest, before or after the piece of the step that made the peak, and workspace is what operators needed
// meanwhile.
struct PeakParts {
  std::string piece;  // of the step: "forward", "backward", "gradient norm", "update"
  std::string place;  // among the units, as the offload engine saw it; empty without one
  Bytes parameters{}, gradients{}, optimizer{}, activations{}, workspace{};

  Bytes total() const { return parameters + gradients + optimizer + activations + workspace; }
};

struct StepMetrics {
  int64_t step = 0;  // 1, 2, …
  // Exactly what the model computed: float32 values, compared bit by bit between runs.
  double loss = 0;
  double grad_norm = 0;  // before clipping
  // Of layers that predict further tokens, which `loss` is without: the mean over them, not weighted; none = not
  // trained.
  std::optional<double> mtp_loss;
  double lr = 0;
  int64_t tokens = 0;
  double step_ms = 0;                    // on the host's clock
  std::optional<double> device_step_ms;  // on the device's own clock, where it has one (sim): of all work of the step
  double data_wait_ms = 0;               // of it, waiting for data that was not read yet
  std::optional<Bytes> device_peak;
  std::optional<PeakParts> peak_parts;
  std::optional<double> mfu;        // model FLOPs done, of those that the devices could have done; none = unknown
  std::optional<double> eval_loss;  // on data.eval after this step
  double eval_ms = 0;               // how long that took, on the host's clock; not part of step_ms
  bool skipped = false;             // not finite, and train.non_finite is skip

  // From the offload engine; zeros without one.
  Bytes host_bytes;  // held by the host pool
  Bytes offloaded_bytes;
  Bytes reloaded_bytes;
  int64_t late_reloads = 0;
  double exposed_wait_ms = 0;
  Bytes planned_drop;
  Bytes measured_drop;
  // From recomputation; zeros without it.
  int64_t reruns = 0;                 // units that ran again for backward
  Bytes bytes_not_kept;               // saved tensors that were let go instead
  std::vector<std::string> findings;  // what kept the peak from falling, for people
  // Models with experts: how many tokens each expert had, over all ranks and micro-batches, layer by layer.
  std::vector<std::vector<int64_t>> expert_load;

  double tokens_per_s() const { return step_ms > 0 ? static_cast<double>(tokens) / step_ms * 1000 : 0; }
};

enum class RunStatus { kFinished, kInterrupted, kOutOfMemory, kNonFinite, kRankFailed };
const char* to_string(RunStatus status);

// A run as a whole. Sums are over all steps, the peak is the largest, times are medians without the first step, which
// also warms up (unless it is the only one).
struct RunSummary {
  std::string name;
  RunStatus status = RunStatus::kFinished;
  std::optional<Bytes> capacity;  // of the device; empty = unlimited or unknown
  std::optional<Bytes> peak;      // of the device, also of a step that did not end
  std::vector<StepMetrics> steps;

  double step_ms() const;
  std::optional<double> device_step_ms() const;
  StepMetrics totals() const;  // bytes, late reloads, waits, reruns; the largest drops and bytes not kept
  // The step with the largest peak; null when none was measured.
  const StepMetrics* fullest_step() const;
  std::optional<double> mfu() const;        // median, as of times
  std::optional<double> eval_loss() const;  // the latest
  // Measured over planned drop of the peak; empty when nothing was planned.
  std::optional<double> ratio() const;
};

// The numbers of a step that make curves, by their names in metrics.jsonl.
std::vector<std::pair<std::string_view, double>> scalars(const StepMetrics& metrics);

// One JSON object; a number that is not finite becomes null, as JSON has no word for it.
std::string to_json_line(const StepMetrics& metrics);
// `message`: why the run ended early, for people; empty becomes null.
std::string to_json(const RunSummary& summary, const std::string& message = "");

// Appends a line per step and flushes it, so that a run can be watched and a killed one leaves what it had.
class MetricsFile {
 public:
  // Replaces the file, but for the lines of its first `kept` steps: those from which a run goes on. UserError when it
  // cannot be written.
  explicit MetricsFile(const std::filesystem::path& path, int64_t kept = 0);
  void write(const StepMetrics& metrics);

 private:
  std::ofstream out_;
};

// Replaces the file in one step: it is whole or it is the old one. UserError when it cannot be written.
void write_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& print);
void write_file(const std::filesystem::path& path, const std::string& text);

}  // namespace neap::train
