// torch-free
#include "neap/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace neap::train {

LearningRate::LearningRate(const OptimSection& optim, int64_t steps)
    : peak_(optim.lr),
      final_ratio_(optim.final_ratio),
      warmup_(optim.warmup),
      steps_(steps),
      schedule_(optim.schedule) {}

double LearningRate::at(int64_t step) const {
  if (step < warmup_) return peak_ * static_cast<double>(step + 1) / static_cast<double>(warmup_);
  // The decay begins at the peak: the warm-up's last step, or step 0 without one.
  const int64_t begin = std::max<int64_t>(warmup_ - 1, 0);
  const int64_t length = std::max<int64_t>(steps_ - 1 - begin, 1);
  const double progress = std::min(1.0, static_cast<double>(step - begin) / static_cast<double>(length));
  switch (schedule_) {
    case Schedule::kConstant:
      return peak_;
    case Schedule::kLinear:
      return peak_ * (1.0 - (1.0 - final_ratio_) * progress);
    case Schedule::kCosine:
      break;
  }
  const double wave = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return peak_ * (final_ratio_ + (1.0 - final_ratio_) * wave);
}

}  // namespace neap::train
