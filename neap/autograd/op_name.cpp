#include "neap/autograd/op_name.h"

#include <memory>
#include <string>
#include <vector>

namespace neap::autograd {
namespace {

struct Observed {
  int observers = 0;
  std::vector<std::string> running;  // outermost first
};

thread_local Observed t_observed;

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  t_observed.running.emplace_back(function.name());
  return nullptr;
}

void end(const at::RecordFunction& /*function*/, at::ObserverContext* /*context*/) {
  // An operator that began before the observer did ends without having been seen.
  if (!t_observed.running.empty()) t_observed.running.pop_back();
}

}  // namespace

OpNames::OpNames() {
  if (t_observed.observers++ > 0) return;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
}

OpNames::~OpNames() {
  if (--t_observed.observers > 0) return;
  at::removeCallback(handle_);
  t_observed.running.clear();
}

std::string_view current_op_name() {
  return t_observed.running.empty() ? std::string_view() : std::string_view(t_observed.running.back());
}

}  // namespace neap::autograd
