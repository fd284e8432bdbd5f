// A unit hook for tests that writes down what happens to it.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/base/mutex.h"
#include "neap/base/scope_exit.h"

namespace neap::autograd::testing {

// "a >" forward entered, "a <" left (however), "a before", "a after", "a failed". Several hooks may share one list.
class EventLogHook final : public UnitHook {
 public:
  EventLogHook(std::vector<std::string>& events, std::string name) : events_(events), name_(std::move(name)) {}

  std::function<void()> on_before, on_after;
  HookPoint* last_unit = nullptr;
  uint64_t last_id = 0;
  std::vector<uint64_t> before_ids, after_ids;

  void around_forward(const UnitCall& call, c10::function_ref<void()> body) override {
    last_unit = &call.unit;
    last_id = call.id;
    add(" >");
    const ScopeExit leave([this] { add(" <"); });
    body();
  }
  void before_backward(const UnitCall& call) override {
    add(" before", &before_ids, call.id);
    if (on_before) on_before();
  }
  void after_backward(const UnitCall& call) override {
    add(" after", &after_ids, call.id);
    if (on_after) on_after();
  }
  void backward_failed(const UnitCall& /*call*/) noexcept override { add(" failed"); }

 private:
  void add(const char* event, std::vector<uint64_t>* ids = nullptr, uint64_t id = 0) {
    static Mutex mutex;  // hooks share their list, and backward may run on several threads
    const MutexLock lock(mutex);
    events_.push_back(name_ + event);
    if (ids != nullptr) ids->push_back(id);
  }

  std::vector<std::string>& events_;
  std::string name_;
};

}  // namespace neap::autograd::testing
