// torch-free
// A short run's metrics, for the tests of what is written about runs.
#pragma once

#include <cstdint>

#include "neap/base/bytes.h"
#include "neap/train/metrics.h"

namespace neap::train {

inline StepMetrics step(int64_t number, double loss, double milliseconds) {
  StepMetrics metrics;
  metrics.step = number;
  metrics.loss = loss;
  metrics.grad_norm = 2 * loss;
  metrics.tokens = 100;
  metrics.step_ms = milliseconds;
  return metrics;
}

inline RunSummary two_steps() {
  RunSummary summary;
  summary.name = "run";
  summary.steps = {step(1, 3.5, 100), step(2, 2.5, 40)};
  summary.steps[0].offloaded_bytes = Bytes(10 << 20);
  summary.steps[1].offloaded_bytes = Bytes(10 << 20);
  summary.steps[1].late_reloads = 3;
  summary.steps[1].planned_drop = Bytes(100 << 20);
  summary.steps[1].measured_drop = Bytes(99 << 20);
  return summary;
}

}  // namespace neap::train
