// Hook points: where features act on a unit of a model, before and after its forward and its backward.
//
// libtorch's C++ modules have no hooks. A module that wants to be a unit derives from Hookable as well and runs its
// body through its hook point:
//
//   class BlockImpl : public torch::nn::Module, public autograd::Hookable {
//     at::Tensor forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
//       return hook_point().run({x, cos, sin}, [&] { return …; });
//     }
//
// With nothing attached, run() is a plain call of the body after one atomic load. Features attach a UnitHook; several
// may share a unit and then nest by HookOrder.
//
// When things happen, for one call of a unit:
//  - around_forward() wraps the body, also under no_grad.
//  - before_backward() comes once per backward pass, when the first gradient of the unit's outputs arrives and before
//  any
//    of it is used. A second thread that brings another gradient waits until it is done.
//  - after_backward() comes once for each before_backward(), as soon as the last node of the unit that this pass runs
//  has
//    computed its gradients; at the end of the pass at the latest. Gradients may still be on their way into a
//    parameter's
//    `.grad`.
//  - If the pass ends by an exception before that, backward_failed() comes instead.
// Calls are independent: a unit that runs three times before one backward gets three pairs. A retained graph gives a
// pair per pass. Without grad mode, or if no output has a gradient, backward events do not come, at no cost.
//
// "The unit" in backward is what lies between the outputs and the tensors given as inputs, together with everything
// else that existed before the call. Tensors that leave the unit by another way than its return value are not outputs.
//
// Forward of one unit may run on several threads at once, and so may backward. attach() and detach() are safe
// meanwhile.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "neap/autograd/visit_tensors.h"
#include "neap/base/mutex.h"

namespace neap::autograd {

class HookPoint;

// Outermost first: the shard hook's around_forward() contains offload's, which contains recompute's. before_backward()
// comes in this order, after_backward() and backward_failed() in the opposite one.
enum class HookOrder : int { kShard = 0, kOffload = 10, kRecompute = 20 };

// One call of a unit's forward, and all that becomes of it in backward.
struct UnitCall {
  HookPoint& unit;
  uint64_t id;  // unique in the process: tells apart several forward passes that wait for their backward
};

// Implemented by features. One object may be attached to any number of units. Exceptions thrown by a hook reach whoever
// called forward or backward.
class UnitHook {
 public:
  virtual ~UnitHook() = default;

  // Calls `body` exactly once; what is opened around that call is open for the unit's forward, and RAII closes it when
  // the body throws:  SavedTensorScope scope(&policy_); body();
  virtual void around_forward(const UnitCall& call, c10::function_ref<void()> body);

  // On the thread of the node that is about to run, with its stream current, inside the backward pass
  // (get_current_graph_task_id() names it).
  virtual void before_backward(const UnitCall& call);
  virtual void after_backward(const UnitCall& call);
  // Also if this hook's before_backward() threw, or was not reached because another one's did. On whatever thread lets
  // go of the failed pass, outside of it.
  virtual void backward_failed(const UnitCall& call) noexcept;
};

namespace internal {

struct Attachment {
  std::shared_ptr<UnitHook> hook;
  HookOrder order;
};
using AttachmentList = std::vector<std::shared_ptr<const Attachment>>;

// The hooks of one hook point, outermost first. The list is replaced, never changed, so that a forward which is under
// way keeps the one it started with.
class Attachments {
 public:
  void add(std::shared_ptr<const Attachment> attachment) NEAP_EXCLUDES(mutex_);
  void remove(const std::shared_ptr<const Attachment>& attachment) NEAP_EXCLUDES(mutex_);
  std::shared_ptr<const AttachmentList> snapshot() const NEAP_EXCLUDES(mutex_);
  bool empty() const noexcept { return count_.load(std::memory_order_acquire) == 0; }

 private:
  void replace(AttachmentList list) NEAP_REQUIRES(mutex_);

  std::atomic<std::size_t> count_{0};
  mutable Mutex mutex_;
  std::shared_ptr<const AttachmentList> list_ NEAP_GUARDED_BY(mutex_) = std::make_shared<AttachmentList>();
};

// What run() does when something is attached, kept out of the template. `outputs` appends the result's tensors.
void run_hooked(HookPoint& unit, const AttachmentList& hooks, at::ArrayRef<at::Tensor> inputs,
                c10::function_ref<void()> body, c10::function_ref<void(std::vector<at::Tensor>&)> outputs);

}  // namespace internal

// Detaches when destroyed. Movable; may outlive the hook point.
class [[nodiscard]] HookHandle {
 public:
  HookHandle() = default;
  ~HookHandle() { detach(); }
  HookHandle(HookHandle&& other) noexcept = default;
  HookHandle& operator=(HookHandle&& other) noexcept;

  // From now on the hook gets no events, not even for graphs built while it was attached. Idempotent.
  void detach() noexcept;
  // False also when the hook point has gone.
  bool attached() const noexcept;

 private:
  friend class HookPoint;
  HookHandle(std::weak_ptr<internal::Attachments> list, std::weak_ptr<const internal::Attachment> attachment)
      : list_(std::move(list)), attachment_(std::move(attachment)) {}

  std::weak_ptr<internal::Attachments> list_;
  std::weak_ptr<const internal::Attachment> attachment_;
};

// One per module instance, owned by it. Hooks are not copied with the module.
class HookPoint {
 public:
  HookPoint() = default;
  HookPoint(const HookPoint&) = delete;
  HookPoint& operator=(const HookPoint&) = delete;

  // Runs the unit. `inputs` are the tensors that come in from other units, whatever way they are passed (undefined ones
  // are fine); `body` returns a Tensor or any value for_each_tensor() can look into.
  template <class Body>
  std::invoke_result_t<Body&> run(at::ArrayRef<at::Tensor> inputs, Body&& body);

  // Hooks of equal order nest in the order they were attached, the first outermost.
  HookHandle attach(std::shared_ptr<UnitHook> hook, HookOrder order);

  bool has_hooks() const noexcept { return !attachments_->empty(); }

 private:
  std::shared_ptr<internal::Attachments> attachments_ = std::make_shared<internal::Attachments>();
};

// Mixin for torch::nn::Module subclasses, found by dynamic_cast. A copy of a module starts without hooks.
class Hookable {
 public:
  virtual ~Hookable() = default;
  HookPoint& hook_point() noexcept { return hook_point_; }

 protected:
  Hookable() = default;
  Hookable(const Hookable& /*other*/) {}
  Hookable& operator=(const Hookable& /*other*/) { return *this; }

 private:
  HookPoint hook_point_;
};

template <class Body>
std::invoke_result_t<Body&> HookPoint::run(at::ArrayRef<at::Tensor> inputs, Body&& body) {
  using Result = std::invoke_result_t<Body&>;
  static_assert(!std::is_void_v<Result> && !std::is_reference_v<Result>, "a unit returns its outputs by value");
  if (!has_hooks()) return body();
  const auto hooks = attachments_->snapshot();
  std::optional<Result> result;
  internal::run_hooked(
      *this, *hooks, inputs, [&] { result.emplace(body()); },
      [&](std::vector<at::Tensor>& outputs) {
        for_each_tensor(*result, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
      });
  return *std::move(result);
}

}  // namespace neap::autograd
