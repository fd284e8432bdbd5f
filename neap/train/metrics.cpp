// torch-free
#include "neap/train/metrics.h"

#include <algorithm>

namespace neap::train {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace

const char* to_string(RunStatus status) {
  switch (status) {
    case RunStatus::kFinished:
      return "finished";
    case RunStatus::kInterrupted:
      return "interrupted";
    case RunStatus::kOutOfMemory:
      return "out_of_memory";
    case RunStatus::kNonFinite:
      return "non_finite";
    case RunStatus::kRankFailed:
      break;
  }
  return "rank_failed";
}

double RunSummary::step_ms() const {
  std::vector<double> times;
  for (const StepMetrics& step : steps) times.push_back(step.step_ms);
  if (times.size() > 1) times.erase(times.begin());
  return median(std::move(times));
}

std::optional<double> RunSummary::device_step_ms() const {
  std::vector<double> times;
  for (const StepMetrics& step : steps) {
    if (step.device_step_ms) times.push_back(*step.device_step_ms);
  }
  if (times.empty()) return std::nullopt;
  if (times.size() > 1) times.erase(times.begin());
  return median(std::move(times));
}

StepMetrics RunSummary::totals() const {
  StepMetrics total;
  for (const StepMetrics& step : steps) {
    total.offloaded_bytes += step.offloaded_bytes;
    total.reloaded_bytes += step.reloaded_bytes;
    total.late_reloads += step.late_reloads;
    total.exposed_wait_ms += step.exposed_wait_ms;
    total.reruns += step.reruns;
    total.bytes_not_kept = std::max(total.bytes_not_kept, step.bytes_not_kept);
    total.host_bytes = std::max(total.host_bytes, step.host_bytes);
    if (step.planned_drop > total.planned_drop) {
      total.planned_drop = step.planned_drop;
      total.measured_drop = step.measured_drop;
    }
  }
  return total;
}

const StepMetrics* RunSummary::fullest_step() const {
  const StepMetrics* fullest = nullptr;
  for (const StepMetrics& step : steps) {
    if (step.device_peak && (fullest == nullptr || step.device_peak > fullest->device_peak)) fullest = &step;
  }
  return fullest;
}

std::optional<double> RunSummary::ratio() const {
  const StepMetrics total = totals();
  if (total.planned_drop.count == 0) return std::nullopt;
  return static_cast<double>(total.measured_drop.count) / static_cast<double>(total.planned_drop.count);
}

}  // namespace neap::train
