// What the trainer asks of an optimizer, and what its kinds share: which parameters they step, and dropping gradients.
//
// All states are allocated by the constructor, so that a run that will not fit says so before its first step. Not
// thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/train/config.h"

namespace neap::train {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // One update with the gradients that are there; a parameter without one is not touched.
  virtual void step(double lr) = 0;
  // Drops the gradients' memory.
  void zero_grad();

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }

  // What it remembers about parameters()[i], by the names of torch.optim: the tensors themselves, so that writing to
  // them restores it.
  using NamedState = std::vector<std::pair<std::string, at::Tensor>>;
  virtual NamedState state_of(size_t i) const = 0;
  Bytes state_bytes() const;

 protected:
  // A parameter listed twice (a tied weight) counts once; one that requires no gradient is left out.
  // `dimensions`: how many each parameter has as a whole, where it is but a piece here (neap/shard) and does not show
  // it; empty: its own.
  Optimizer(const std::vector<at::Tensor>& parameters, Decay decay, const std::vector<int64_t>& dimensions);

  // Calls `visit(indices, decays)` for the parameters with a gradient that decay, and for those that do not.
  template <class Visit>
  void for_each_group(const Visit& visit) const {
    for (const bool decays : {true, false}) {
      std::vector<size_t> indices;
      for (size_t i = 0; i < parameters_.size(); ++i) {
        if (decays_[i] == decays && parameters_[i].grad().defined()) indices.push_back(i);
      }
      if (!indices.empty()) visit(indices, decays);
    }
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<bool> decays_;  // one per parameter
};

std::unique_ptr<Optimizer> make_optimizer(const OptimSection& section, const std::vector<at::Tensor>& parameters,
                                          const std::vector<int64_t>& dimensions = {});

}  // namespace neap::train
