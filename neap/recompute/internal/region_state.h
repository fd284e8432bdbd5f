// One call of a region: what its placeholders share, and the runs that backward passes make of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/base/mutex.h"
#include "neap/recompute/internal/environment.h"
#include "neap/recompute/internal/generators.h"
#include "neap/recompute/internal/saved_tensor.h"
#include "neap/recompute/internal/shared.h"

namespace neap::recompute::internal {

// What a region is called, and the devices it draws random numbers on beside the CPU and those of its inputs.
struct RegionLabel {
  std::string name;
  std::vector<c10::Device> devices;
};

// Owned by its placeholders: dies with the last saved tensor of the region.
//
// First run (one thread): constructor, add() per saved tensor, forward_done(). Then get() and release() on any thread.
class RegionState : public std::enable_shared_from_this<RegionState> {
 public:
  // Saves the inputs through the scope that is open on this thread. `again` runs the region once more.
  RegionState(const RegionLabel& label, std::shared_ptr<Shared> shared, at::ArrayRef<at::Tensor> inputs,
              autograd::Rerun again);

  // The index under which the tensor will be known.
  std::size_t add(const at::Tensor& tensor);
  void forward_done();

  // The tensor as it is computed again, once per backward pass and on first demand. A tensor is handed over once a
  // pass; asking again in a pass that keeps its graph runs the region again.
  at::Tensor get(std::size_t index);
  // Nobody will ask for this tensor any more.
  void release(std::size_t index) noexcept;

 private:
  // One input, as saved; kept as it is when it cannot be saved (undefined, inference tensor).
  struct Input {
    torch::autograd::SavedVariable saved;
    at::Tensor kept;
    bool requires_grad = false;
  };
  // What one backward pass made of the region.
  struct Run {
    std::thread::id thread;
    bool ready = false;
    std::vector<Captured> tensors;  // once ready
  };
  struct RunEnd;

  void save_input(const at::Tensor& input);
  std::vector<at::Tensor> fresh_inputs();
  std::vector<Captured> run_again();
  std::shared_ptr<Run> run_of(int task, std::size_t index);
  void publish(Run& run, std::vector<Captured> tensors);
  void forget(int task) noexcept;
  at::Tensor check_unchanged(const Captured& captured, std::size_t index) const;

  const std::string name_;
  const std::shared_ptr<Shared> shared_;
  const Environment environment_;
  GeneratorStates generators_;
  const autograd::Rerun again_;
  std::vector<Input> inputs_;
  std::vector<SavedTensor> saved_;  // grows in the first run alone
  bool complete_ = false;           // the first run is over

  Mutex mutex_;
  CondVar changed_;
  std::vector<bool> released_ NEAP_GUARDED_BY(mutex_);
  std::map<int, std::shared_ptr<Run>> runs_ NEAP_GUARDED_BY(mutex_);  // by graph task
};

// Runs a region for the first time: `forward` on the given inputs, with placeholders for what it saves. REQUIRES: grad
// mode is on.
void run_region(const RegionLabel& label, const std::shared_ptr<Shared>& shared, at::ArrayRef<at::Tensor> inputs,
                c10::function_ref<void()> forward, autograd::Rerun again);

}  // namespace neap::recompute::internal
