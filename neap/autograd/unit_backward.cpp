#include "neap/autograd/unit_backward.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <memory>
#include <unordered_set>
#include <utility>

#include "neap/autograd/graph_task.h"
#include "neap/base/error_boundary.h"
#include "neap/base/mutex.h"

namespace neap::autograd::internal {

namespace ag = torch::autograd;

namespace {

// Null if it was detached since.
std::shared_ptr<const Attachment> attached(const std::weak_ptr<const Attachment>& weak) {
  std::shared_ptr<const Attachment> attachment = weak.lock();
  return attachment != nullptr && !attachment->detached ? attachment : nullptr;
}

// Asked from a hook on the node: false when its gradient is only captured, as in grad(loss, {output}). The root of the
// pass is in no list of its nodes, but runs.
bool about_to_run(ag::Node* node) {
  const auto* exec_info = ag::get_current_graph_task_exec_info();
  return exec_info == nullptr || exec_info->empty() || runs_in_current_pass(node);
}

// One call of a unit, as its graph remembers it. Owned by the hooks on its nodes and by the passes under way.
class CallRecord : public std::enable_shared_from_this<CallRecord> {
 public:
  CallRecord(const UnitCall& call, const AttachmentList& hooks) : call_(call), hooks_(hooks.begin(), hooks.end()) {}

  // Called while the graph is built; afterwards the nodes only leave.
  void add_exit(ag::Node* node) {
    const MutexLock lock(mutex_);
    exits_.push_back(node);
  }
  void exit_died(ag::Node* node) noexcept {
    const MutexLock lock(mutex_);
    std::erase(exits_, node);
  }

  void gradient_arrived(ag::Node* output);  // which is about to run
  void exit_ran();

 private:
  // One backward pass through this call.
  struct Pass {
    explicit Pass(int graph_task) : task(graph_task) {}
    const int task;
    std::atomic<std::size_t> exits_left{0};
    Mutex mutex;  // held while before_backward() runs, so that a second thread waits for its end
    bool begun NEAP_GUARDED_BY(mutex) = false;
    bool ended NEAP_GUARDED_BY(mutex) = false;
  };

  // Held by the graph task in the form of a callback. Destroyed without having run, it tells of a failed pass.
  struct PassEnd {
    std::shared_ptr<CallRecord> record;
    std::shared_ptr<Pass> pass;
    ~PassEnd() { record->forget(*pass); }
  };

  std::shared_ptr<Pass> current_pass(ag::Node* running = nullptr);
  bool close(Pass& pass);
  void finish(Pass& pass);
  void forget(Pass& pass) noexcept;

  const UnitCall call_;
  const std::vector<std::weak_ptr<const Attachment>> hooks_;
  Mutex mutex_;
  std::vector<ag::Node*> exits_ NEAP_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Pass>> passes_ NEAP_GUARDED_BY(mutex_);
};

void CallRecord::gradient_arrived(ag::Node* output) {
  const std::shared_ptr<Pass> pass = current_pass(output);
  const MutexLock lock(pass->mutex);
  if (std::exchange(pass->begun, true)) return;
  for (const auto& weak : hooks_) {
    if (const auto attachment = attached(weak)) attachment->hook->before_backward(call_);
  }
}

void CallRecord::exit_ran() {
  const std::shared_ptr<Pass> pass = current_pass();
  if (pass->exits_left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(*pass);
}

std::shared_ptr<CallRecord::Pass> CallRecord::current_pass(ag::Node* running) {
  const int task = ag::get_current_graph_task_id();
  std::shared_ptr<PassEnd> end;  // outside of the lock, which its destructor takes
  const MutexLock lock(mutex_);
  for (const auto& pass : passes_) {
    if (pass->task == task) return pass;
  }
  auto pass = std::make_shared<Pass>(task);
  pass->exits_left = static_cast<std::size_t>(std::count_if(
      exits_.begin(), exits_.end(), [&](ag::Node* node) { return node == running || runs_in_current_pass(node); }));
  end = std::make_shared<PassEnd>(shared_from_this(), pass);
  ag::Engine::get_default_engine().queue_callback(
      [end] { at_error_boundary([&] { end->record->finish(*end->pass); }); });
  passes_.push_back(pass);
  return pass;
}

// True for the one caller that ends a pass which has begun.
bool CallRecord::close(Pass& pass) {
  const MutexLock lock(pass.mutex);
  return pass.begun && !std::exchange(pass.ended, true);
}

void CallRecord::finish(Pass& pass) {
  if (!close(pass)) return;
  std::exception_ptr first_error;
  for (auto weak = hooks_.rbegin(); weak != hooks_.rend(); ++weak) {
    const auto attachment = attached(*weak);
    if (attachment == nullptr) continue;
    try {
      attachment->hook->after_backward(call_);
    } catch (...) {
      // The other features' hooks have to get their event all the same.
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

void CallRecord::forget(Pass& pass) noexcept {
  if (close(pass)) {
    for (auto weak = hooks_.rbegin(); weak != hooks_.rend(); ++weak) {
      if (const auto attachment = attached(*weak)) attachment->hook->backward_failed(call_);
    }
  }
  const MutexLock lock(mutex_);
  std::erase_if(passes_, [&](const auto& known) { return known.get() == &pass; });
}

// On a node that made an output: runs before the node does.
class OutputHook final : public ag::FunctionPreHook {
 public:
  OutputHook(std::shared_ptr<CallRecord> record, ag::Node* node) : record_(std::move(record)), node_(node) {}

  ag::variable_list operator()(const ag::variable_list& grads) override {
    if (about_to_run(node_)) at_error_boundary([&] { record_->gradient_arrived(node_); });
    return grads;
  }

 private:
  std::shared_ptr<CallRecord> record_;
  ag::Node* node_;  // owns this hook
};

// On a node all of whose edges leave the unit: runs after the node has. When the last one has run, so has every node of
// the unit, because each of them leads to one of these.
class ExitHook final : public ag::FunctionPostHook {
 public:
  ExitHook(std::shared_ptr<CallRecord> record, ag::Node* node) : record_(std::move(record)), node_(node) {
    record_->add_exit(node_);
  }
  ~ExitHook() override { record_->exit_died(node_); }

  ag::variable_list operator()(const ag::variable_list& grads, const ag::variable_list& /*output_grads*/) override {
    at_error_boundary([&] { record_->exit_ran(); });
    return grads;
  }

 private:
  std::shared_ptr<CallRecord> record_;
  ag::Node* node_;  // owns this hook
};

// The nodes of the outputs, each once.
std::vector<ag::Node*> output_nodes(const UnitBoundary& boundary, const std::vector<at::Tensor>& outputs) {
  std::vector<ag::Node*> nodes;
  for (const at::Tensor& tensor : outputs) {
    if (!tensor.defined()) continue;
    ag::Node* node = tensor.grad_fn().get();
    // An output that is an input handed through, or a leaf, is no work of this unit.
    if (node == nullptr || !boundary.inside(*node)) continue;
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
  }
  return nodes;
}

// The nodes of the unit that are reached from `roots` and from which no edge stays inside.
std::vector<ag::Node*> exit_nodes(const UnitBoundary& boundary, const std::vector<ag::Node*>& roots) {
  std::vector<ag::Node*> exits;
  std::vector<ag::Node*> pending = roots;
  std::unordered_set<ag::Node*> seen(roots.begin(), roots.end());
  while (!pending.empty()) {
    ag::Node* node = pending.back();
    pending.pop_back();
    bool leads_inside = false;
    for (const ag::Edge& edge : node->next_edges()) {
      ag::Node* next = edge.function.get();
      if (next == nullptr || !boundary.inside(*next)) continue;
      leads_inside = true;
      if (seen.insert(next).second) pending.push_back(next);
    }
    if (!leads_inside) exits.push_back(node);
  }
  return exits;
}

}  // namespace

std::optional<UnitBoundary> UnitBoundary::before_forward(at::ArrayRef<at::Tensor> inputs) {
  if (!c10::GradMode::is_enabled()) return std::nullopt;
  UnitBoundary boundary;
  for (const at::Tensor& input : inputs) {
    // Asking a view for its node may create the node, so it has to happen before the count is taken.
    if (input.defined() && input.grad_fn() != nullptr) boundary.input_nodes_.push_back(input.grad_fn());
  }
  boundary.first_sequence_nr_ = at::sequence_number::peek();
  return boundary;
}

bool UnitBoundary::inside(const ag::Node& node) const {
  // Gradient accumulators belong to their parameter and outlive every graph; they carry the highest number.
  if (node.sequence_nr() == std::numeric_limits<uint64_t>::max()) return false;
  if (node.sequence_nr() < first_sequence_nr_) return false;
  return std::none_of(input_nodes_.begin(), input_nodes_.end(),
                      [&](const NodePtr& input) { return input.get() == &node; });
}

void watch_backward(const UnitCall& call, const AttachmentList& hooks, const UnitBoundary& boundary,
                    const std::vector<at::Tensor>& outputs) {
  const std::vector<ag::Node*> roots = output_nodes(boundary, outputs);
  if (roots.empty()) return;
  const auto record = std::make_shared<CallRecord>(call, hooks);
  if (std::ranges::any_of(hooks, [](const auto& attachment) { return attachment->hook->wants_after_backward(); })) {
    for (ag::Node* node : exit_nodes(boundary, roots)) node->add_post_hook(std::make_unique<ExitHook>(record, node));
  }
  for (ag::Node* node : roots) {
    // In front: of units nested in one another the outer one, which comes here last, has its event first.
    auto& hooks_of_node = node->tensor_pre_hooks();
    hooks_of_node.insert(hooks_of_node.begin(), std::make_unique<OutputHook>(record, node));
  }
}

}  // namespace neap::autograd::internal
