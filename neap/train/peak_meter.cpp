#include "neap/train/peak_meter.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "neap/autograd/node_ptr.h"
#include "neap/shard/fully_shard.h"

namespace neap::train {

struct PeakMeter::Hooked {
  autograd::NodePtr accumulator;  // kept: a parameter refers to it weakly, and a new one would have no hook
  std::uintptr_t hook = 0;
  Bytes bytes;
  bool has_gradient = false;
};

class PeakMeter::Arrival final : public torch::autograd::FunctionPostHook {
 public:
  Arrival(PeakMeter& meter, size_t parameter) : meter_(meter), parameter_(parameter) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& /*inputs*/) override {
    meter_.arrived(parameter_);
    return outputs;
  }

 private:
  PeakMeter& meter_;
  const size_t parameter_;
};

PeakMeter::PeakMeter(const std::vector<at::Tensor>& parameters, const device::Device& device) : device_(device) {
  if (!device.memory_stats()) return;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) {  // frozen: held, and no gradient will come
      parameters_ += Bytes(static_cast<int64_t>(parameter.nbytes()));
      continue;
    }
    Hooked hooked{.accumulator = torch::autograd::impl::grad_accumulator(parameter),
                  .bytes = Bytes(static_cast<int64_t>(parameter.nbytes()))};
    hooked.hook = hooked.accumulator->add_post_hook(std::make_unique<Arrival>(*this, hooked_.size()));
    parameters_ += hooked.bytes;
    hooked_.push_back(std::move(hooked));
  }
}

PeakMeter::PeakMeter(shard::Sharded& sharded, const device::Device& device) : device_(device), sharded_(&sharded) {}

PeakMeter::~PeakMeter() {
  if (sharded_ != nullptr) sharded_->watch_memory({});
  for (const Hooked& hooked : hooked_) hooked.accumulator->del_post_hook(hooked.hook);
}

void PeakMeter::begin_step(Bytes optimizer_state) {
  for (Hooked& hooked : hooked_) hooked.has_gradient = false;
  optimizer_ = optimizer_state;
  gradients_ = peak_ = Bytes(0);
  if (sharded_ != nullptr && device_.memory_stats()) sharded_->watch_memory([this] { look(piece_); });
  parts_.reset();
  look("between steps");
}

void PeakMeter::arrived(size_t parameter) {
  Hooked& hooked = hooked_[parameter];
  const bool is_new = !std::exchange(hooked.has_gradient, true);
  look("backward", is_new ? hooked.bytes : Bytes(0));
}

void PeakMeter::look(const char* piece) { look(piece, Bytes(0)); }

void PeakMeter::look(const char* piece, Bytes arrived) {
  const auto stats = device_.memory_stats();
  if (!stats) return;
  if (sharded_ != nullptr) {
    const shard::Held held = sharded_->held();
    parameters_ = held.parameters;
    gradients_ = held.gradients;
  }
  const Bytes state = parameters_ + optimizer_ + gradients_;
  const Bytes rest_before = std::exchange(rest_, std::max(Bytes(0), stats->allocated - state - arrived));
  if (stats->allocated_peak > peak_) {
    peak_ = stats->allocated_peak;
    const Bytes rest = std::max(Bytes(0), peak_ - state);
    // Activations come and go between looks, but forward only adds to them and backward only takes from them.
    const Bytes activations = std::min(rest, std::max(rest_before, rest_));
    parts_ = PeakParts{.piece = piece,
                       .place = {},
                       .parameters = parameters_,
                       .gradients = gradients_,
                       .optimizer = optimizer_,
                       .activations = activations,
                       .workspace = rest - activations};
  }
  gradients_ += arrived;
}

}  // namespace neap::train
