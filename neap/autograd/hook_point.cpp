#include "neap/autograd/hook_point.h"

#include <algorithm>

#include "neap/autograd/unit_backward.h"
#include "neap/base/error.h"

namespace neap::autograd {

static constinit thread_local int t_reruns = 0;

bool running_again() noexcept { return t_reruns > 0; }
RunningAgain::RunningAgain() noexcept { ++t_reruns; }
RunningAgain::~RunningAgain() { --t_reruns; }

void UnitHook::around_forward(const UnitCall& /*call*/, c10::function_ref<void()> body) { body(); }
void UnitHook::around_repeatable(const UnitCall& call, const UnitForward& forward) {
  around_forward(call, forward.body());
}
void UnitHook::before_backward(const UnitCall& /*call*/) {}
void UnitHook::after_backward(const UnitCall& /*call*/) {}
bool UnitHook::wants_after_backward() const { return true; }
void UnitHook::backward_failed(const UnitCall& /*call*/) noexcept {}

namespace internal {

void Attachments::add(std::shared_ptr<const Attachment> attachment) {
  const MutexLock lock(mutex_);
  AttachmentList list = *list_;
  const auto place = std::upper_bound(list.begin(), list.end(), attachment,
                                      [](const auto& a, const auto& b) { return a->order < b->order; });
  list.insert(place, std::move(attachment));
  replace(std::move(list));
}

void Attachments::remove(const std::shared_ptr<const Attachment>& attachment) {
  const MutexLock lock(mutex_);
  AttachmentList list = *list_;
  std::erase(list, attachment);
  attachment->detached = true;
  replace(std::move(list));
}

std::shared_ptr<const AttachmentList> Attachments::snapshot() const {
  const MutexLock lock(mutex_);
  return list_;
}

void Attachments::replace(AttachmentList list) {
  count_.store(list.size(), std::memory_order_release);
  list_ = std::make_shared<AttachmentList>(std::move(list));
}

namespace {

std::atomic<uint64_t> g_next_call{0};

// The hooks' around_forward() calls, one inside the other, and the unit's body in the middle.
class Nest {
 public:
  Nest(const UnitCall& call, const std::shared_ptr<const AttachmentList>& hooks, at::ArrayRef<at::Tensor> inputs,
       c10::function_ref<void()> body, const Repeat* repeat)
      : call_(call), hooks_(hooks), inputs_(inputs), body_(body), repeat_(repeat) {}

  void run() {
    enter(0);
    NEAP_ASSERT(entered_ == 1 && completed_ == 1,
                "around_forward() must call the body exactly once and let its exceptions pass; found ", entered_,
                " calls, of which ", completed_, " returned");
  }

 private:
  void enter(std::size_t depth) {
    if (depth == hooks_->size()) {
      ++entered_;
      body_();
      ++completed_;
      return;
    }
    const auto inner = [&] { enter(depth + 1); };
    const auto again = [&] { return again_from(depth + 1); };
    (*hooks_)[depth]->hook->around_repeatable(call_, UnitForward(inputs_, inner, again));
  }

  // Keeps the hooks further in: with others, the second run might save other tensors than the first.
  Rerun again_from(std::size_t depth) const {
    if (repeat_ == nullptr) return {};
    auto hooks =
        std::make_shared<const AttachmentList>(hooks_->begin() + static_cast<std::ptrdiff_t>(depth), hooks_->end());
    return [call = call_, hooks = std::shared_ptr<const AttachmentList>(std::move(hooks)), module = repeat_->module,
            body = repeat_->body()](at::ArrayRef<at::Tensor> inputs) {
      const std::shared_ptr<const void> alive = module.lock();
      NEAP_CHECK(alive != nullptr,
                 "[hook point] expected the module of a unit that runs again in backward to be alive; found it "
                 "destroyed since forward; keep the model until backward is done");
      const RunningAgain mark;
      const auto run_body = [&] { body(inputs); };
      const auto copy_body = [&] { return body; };
      const Repeat repeat{module, copy_body};
      Nest(call, hooks, inputs, run_body, &repeat).run();
    };
  }

  const UnitCall& call_;
  const std::shared_ptr<const AttachmentList>& hooks_;
  at::ArrayRef<at::Tensor> inputs_;
  c10::function_ref<void()> body_;
  const Repeat* repeat_;
  int entered_ = 0;
  int completed_ = 0;
};

}  // namespace

void run_hooked(HookPoint& unit, const std::shared_ptr<const AttachmentList>& hooks, at::ArrayRef<at::Tensor> inputs,
                c10::function_ref<void()> body, c10::function_ref<void(std::vector<at::Tensor>&)> outputs,
                const Repeat* repeat) {
  const UnitCall call{unit, g_next_call.fetch_add(1, std::memory_order_relaxed)};
  std::optional<UnitBoundary> boundary = UnitBoundary::before_forward(inputs);
  Nest(call, hooks, inputs, body, repeat).run();
  if (!boundary.has_value()) return;
  std::vector<at::Tensor> tensors;
  outputs(tensors);
  watch_backward(call, *hooks, *boundary, tensors);
}

}  // namespace internal

HookHandle HookPoint::attach(std::shared_ptr<UnitHook> hook, HookOrder order) {
  NEAP_CHECK(hook != nullptr, "[hook point] expected a hook to attach; found null");
  auto attachment = std::make_shared<const internal::Attachment>(std::move(hook), order);
  HookHandle handle(attachments_, attachment);
  attachments_->add(std::move(attachment));
  return handle;
}

HookHandle& HookHandle::operator=(HookHandle&& other) noexcept {
  if (this != &other) {
    detach();
    list_ = std::move(other.list_);
    attachment_ = std::move(other.attachment_);
  }
  return *this;
}

void HookHandle::detach() noexcept {
  const std::shared_ptr<internal::Attachments> list = list_.lock();
  const std::shared_ptr<const internal::Attachment> attachment = attachment_.lock();
  if (list != nullptr && attachment != nullptr) list->remove(attachment);
  list_.reset();
  attachment_.reset();
}

bool HookHandle::attached() const noexcept { return !attachment_.expired(); }

}  // namespace neap::autograd
