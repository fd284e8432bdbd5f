// torch-free
// The learning rate of every step: a linear rise over the warm-up, then constant, linear or cosine to the last step.
#pragma once

#include <cstdint>

#include "neap/train/config.h"

namespace neap::train {

class LearningRate {
 public:
  LearningRate(const OptimSection& optim, int64_t steps);

  // Of step 0 … steps-1. The warm-up's last step has the peak, the run's last step peak * final_ratio.
  double at(int64_t step) const;

 private:
  double peak_;
  double final_ratio_;
  int64_t warmup_;
  int64_t steps_;
  Schedule schedule_;
};

}  // namespace neap::train
