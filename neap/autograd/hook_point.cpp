#include "neap/autograd/hook_point.h"

#include <algorithm>

#include "neap/autograd/unit_backward.h"
#include "neap/base/error.h"

namespace neap::autograd {

void UnitHook::around_forward(const UnitCall& /*call*/, c10::function_ref<void()> body) { body(); }
void UnitHook::before_backward(const UnitCall& /*call*/) {}
void UnitHook::after_backward(const UnitCall& /*call*/) {}
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
struct Nest {
  const UnitCall& call;
  const AttachmentList& hooks;
  c10::function_ref<void()> body;
  int entered = 0;
  int completed = 0;

  void enter(std::size_t depth) {
    if (depth < hooks.size()) {
      hooks[depth]->hook->around_forward(call, [&] { enter(depth + 1); });
      return;
    }
    ++entered;
    body();
    ++completed;
  }
};

}  // namespace

void run_hooked(HookPoint& unit, const AttachmentList& hooks, at::ArrayRef<at::Tensor> inputs,
                c10::function_ref<void()> body, c10::function_ref<void(std::vector<at::Tensor>&)> outputs) {
  const UnitCall call{unit, g_next_call.fetch_add(1, std::memory_order_relaxed)};
  std::optional<UnitBoundary> boundary = UnitBoundary::before_forward(inputs);
  Nest nest{call, hooks, body};
  nest.enter(0);
  NEAP_ASSERT(nest.entered == 1 && nest.completed == 1,
              "around_forward() must call the body exactly once and let its exceptions pass; found ", nest.entered,
              " calls, of which ", nest.completed, " returned");
  if (!boundary.has_value()) return;
  std::vector<at::Tensor> tensors;
  outputs(tensors);
  watch_backward(call, hooks, *boundary, tensors);
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
