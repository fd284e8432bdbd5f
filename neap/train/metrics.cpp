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

// Without the first, which also warms up, unless it is the only one.
double warm_median(std::vector<double> values) {
  if (values.size() > 1) values.erase(values.begin());
  return median(std::move(values));
}

// Of the steps that have the value.
std::optional<double> median_of(const std::vector<StepMetrics>& steps, std::optional<double> StepMetrics::*member) {
  std::vector<double> values;
  for (const StepMetrics& step : steps) {
    if (step.*member) values.push_back(*(step.*member));
  }
  return values.empty() ? std::nullopt : std::optional(warm_median(std::move(values)));
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
  return warm_median(std::move(times));
}

std::optional<double> RunSummary::device_step_ms() const { return median_of(steps, &StepMetrics::device_step_ms); }
std::optional<double> RunSummary::mfu() const { return median_of(steps, &StepMetrics::mfu); }

std::optional<double> RunSummary::eval_loss() const {
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (step->eval_loss) return step->eval_loss;
  }
  return std::nullopt;
}

std::vector<std::pair<std::string_view, double>> scalars(const StepMetrics& m) {
  std::vector<std::pair<std::string_view, double>> out = {{"loss", m.loss},
                                                          {"grad_norm", m.grad_norm},
                                                          {"lr", m.lr},
                                                          {"tokens_per_s", m.tokens_per_s()},
                                                          {"step_ms", m.step_ms}};
  if (m.device_step_ms) out.emplace_back("device_step_ms", *m.device_step_ms);
  if (m.device_peak) out.emplace_back("device_peak", static_cast<double>(m.device_peak->count));
  if (m.mfu) out.emplace_back("mfu", *m.mfu);
  if (m.eval_loss) out.emplace_back("eval_loss", *m.eval_loss);
  if (m.mtp_loss) out.emplace_back("mtp_loss", *m.mtp_loss);
  if (m.host_bytes.count > 0) {
    out.emplace_back("host_bytes", static_cast<double>(m.host_bytes.count));
    out.emplace_back("late_reloads", static_cast<double>(m.late_reloads));
  }
  return out;
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
