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
// A unit that may be run again in backward (recompute) instead names a member function and hands it what it needs:
//
//     at::Tensor forward(const at::Tensor& x, const RotaryTables& rotary) {
//       return hook_point().run(*this, {x, rotary.cos, rotary.sin}, &BlockImpl::body);
//     }
//
// The inputs reach the body through the hook point, so that a second run can be given others. Further arguments are
// copied when a hook asks for a second run; a lambda is taken too, if it captures nothing. Hence nothing that a later
// run uses can have died with forward, and the module itself is checked for being alive.
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
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "neap/autograd/version_stamp.h"
#include "neap/autograd/visit_tensors.h"
#include "neap/base/error.h"
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

// Runs a unit's forward again on other inputs, in the order in which run() was given them; the outputs are dropped.
// Owns all it needs but the module. On any thread, any number of times. Throws UserError if the module is gone, and
// what autograd throws if a tensor among the body's further arguments was changed in place since.
using Rerun = std::function<void(at::ArrayRef<at::Tensor> inputs)>;

// This thread is inside a Rerun or another second run: units that run now do so for tensors of a pass whose forward is
// long over. What comes out of them is thrown away, and an exception may end them when those tensors are there.
bool running_again() noexcept;

// Makes running_again() true on this thread while it lives. May nest.
class RunningAgain {
 public:
  RunningAgain() noexcept;
  ~RunningAgain();
  RunningAgain(const RunningAgain&) = delete;
  RunningAgain& operator=(const RunningAgain&) = delete;
};

// The forward of one call, as a hook meets it. Lives as long as around_forward() does.
class UnitForward {
 public:
  UnitForward(at::ArrayRef<at::Tensor> inputs, c10::function_ref<void()> body, c10::function_ref<Rerun()> again)
      : inputs_(inputs), body_(body), again_(again) {}

  // As given to run().
  at::ArrayRef<at::Tensor> inputs() const { return inputs_; }
  // What is inside of this hook: the next hook's around_forward(), or the unit's body.
  c10::function_ref<void()> body() const { return body_; }
  // A way to run the same again. Empty if the unit gave its hook point a body that takes no arguments.
  Rerun again() const { return again_(); }

 private:
  at::ArrayRef<at::Tensor> inputs_;
  c10::function_ref<void()> body_;
  c10::function_ref<Rerun()> again_;
};

// Implemented by features. One object may be attached to any number of units. Exceptions thrown by a hook reach whoever
// called forward or backward.
class UnitHook {
 public:
  virtual ~UnitHook() = default;

  // Calls `body` exactly once; what is opened around that call is open for the unit's forward, and RAII closes it when
  // the body throws:  SavedTensorScope scope(&policy_); body();
  virtual void around_forward(const UnitCall& call, c10::function_ref<void()> body);
  // The same for a hook that needs the inputs, or the unit to run again. Calls around_forward() unless overridden.
  virtual void around_repeatable(const UnitCall& call, const UnitForward& forward);

  // On the thread of the node that is about to run, with its stream current, inside the backward pass
  // (get_current_graph_task_id() names it).
  virtual void before_backward(const UnitCall& call);
  virtual void after_backward(const UnitCall& call);
  // False if after_backward() may as well come at the end of the pass: finding where a unit's own backward ends takes a
  // walk through its graph, spared when none of its hooks wants that. Constant.
  virtual bool wants_after_backward() const;
  // Also if this hook's before_backward() threw, or was not reached because another one's did. On whatever thread lets
  // go of the failed pass, outside of it.
  virtual void backward_failed(const UnitCall& call) noexcept;
};

namespace internal {

struct Attachment {
  Attachment(std::shared_ptr<UnitHook> h, HookOrder o) : hook(std::move(h)), order(o) {}

  const std::shared_ptr<UnitHook> hook;
  const HookOrder order;
  mutable std::atomic<bool> detached = false;  // kept only for later runs of calls made before
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

// What it takes to run a body again.
struct Repeat {
  std::weak_ptr<const void> module;  // expires with it
  c10::function_ref<Rerun()> body;   // copies the body's arguments
};

// What run() does when something is attached, kept out of the template. `outputs` appends the result's tensors.
// `repeat` is null for a body that cannot be run again.
void run_hooked(HookPoint& unit, const std::shared_ptr<const AttachmentList>& hooks, at::ArrayRef<at::Tensor> inputs,
                c10::function_ref<void()> body, c10::function_ref<void(std::vector<at::Tensor>&)> outputs,
                const Repeat* repeat);

// Arguments of a body beside its inputs, kept for later runs. Tensors in them are used as they are, so they must not
// have changed.
template <class... Args>
class KeptArguments {
 public:
  explicit KeptArguments(const Args&... args) : values_(args...) {
    for_each_tensor(values_, [&](const at::Tensor& tensor) { stamps_.emplace_back(tensor); });
  }
  // Throws what autograd throws if a tensor has changed.
  const std::tuple<Args...>& get() const {
    auto stamp = stamps_.begin();
    for_each_tensor(values_, [&](const at::Tensor& tensor) { (stamp++)->check(tensor); });
    return values_;
  }

 private:
  std::tuple<Args...> values_;
  std::vector<VersionStamp> stamps_;
};

// Calls body(module, inputs[0], …, inputs[N - 1], args…).
template <std::size_t N, class Body, class Module, class... Args>
decltype(auto) call_body(Body& body, Module& module, const at::Tensor* inputs, const Args&... args) {
  return [&]<std::size_t... I>(std::index_sequence<I...>)->decltype(auto) {
    return std::invoke(body, module, inputs[I]..., args...);
  }
  (std::make_index_sequence<N>());
}

template <class Body>
inline constexpr bool kCapturesNothing = std::is_member_function_pointer_v<Body> || std::is_empty_v<Body>;

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

  // Runs a unit that can be run again: body(module, inputs…, args…), where `body` is a member function of the module or
  // a lambda without captures. REQUIRES: this is the module's hook point.
  template <class Module, std::size_t N, class Body, class... Args>
  auto run(Module& module, const at::Tensor (&inputs)[N], Body body, const Args&... args);

  // Hooks of equal order nest in the order they were attached, the first outermost.
  HookHandle attach(std::shared_ptr<UnitHook> hook, HookOrder order);

  bool has_hooks() const noexcept { return !attachments_->empty(); }

 private:
  // Expires with the module. Keeps it while locked if a shared_ptr owns it.
  template <class Module>
  std::weak_ptr<const void> lifetime_of(Module& module) const {
    if constexpr (requires { module.weak_from_this(); }) {
      std::weak_ptr<const void> owned = module.weak_from_this();
      if (!owned.expired()) return owned;
    }
    return attachments_;
  }

  template <class Result, class Call>
  Result run_with(const internal::Repeat* repeat, at::ArrayRef<at::Tensor> inputs, Call& call);

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

template <class Result, class Call>
Result HookPoint::run_with(const internal::Repeat* repeat, at::ArrayRef<at::Tensor> inputs, Call& call) {
  static_assert(!std::is_void_v<Result> && !std::is_reference_v<Result>, "a unit returns its outputs by value");
  std::optional<Result> result;
  internal::run_hooked(
      *this, attachments_->snapshot(), inputs, [&] { result.emplace(call()); },
      [&](std::vector<at::Tensor>& outputs) {
        for_each_tensor(*result, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
      },
      repeat);
  return *std::move(result);
}

template <class Body>
std::invoke_result_t<Body&> HookPoint::run(at::ArrayRef<at::Tensor> inputs, Body&& body) {
  if (!has_hooks()) return body();
  return run_with<std::invoke_result_t<Body&>>(nullptr, inputs, body);
}

template <class Module, std::size_t N, class Body, class... Args>
auto HookPoint::run(Module& module, const at::Tensor (&inputs)[N], Body body, const Args&... args) {
  static_assert(internal::kCapturesNothing<Body>,
                "the body of a unit that can run again is a member function or a lambda without captures: what it "
                "captures may be gone when it runs again; hand it over as an argument");
  static_assert((!std::is_pointer_v<std::decay_t<Args>> && ...), "arguments are kept, what they point at is not");
  const auto call = [&] { return internal::call_body<N>(body, module, inputs, args...); };
  if (!has_hooks()) return call();
  const auto again = [&]() -> Rerun {
    return [body, module = &module,
            kept = internal::KeptArguments<std::decay_t<Args>...>(args...)](at::ArrayRef<at::Tensor> others) {
      std::apply([&](const auto&... values) { internal::call_body<N>(body, *module, others.data(), values...); },
                 kept.get());
    };
  };
  const internal::Repeat repeat{lifetime_of(module), again};
  return run_with<decltype(call())>(&repeat, inputs, call);
}

}  // namespace neap::autograd
