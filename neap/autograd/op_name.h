// The operator that runs on this thread, for policies and messages that go by it.
//
// Saved-tensor hooks are not told which operator saves. While an OpNames lives, the thread's operators are observed by
// torch's own means (a record function, as the profiler uses); that costs some 100 ns per operator, so it is opened
// only where somebody may ask.
#pragma once

#include <ATen/record_function.h>

#include <string_view>

namespace neap::autograd {

// REQUIRES: destroyed on the thread that made it. May nest.
class OpNames {
 public:
  OpNames();
  ~OpNames();
  OpNames(const OpNames&) = delete;
  OpNames& operator=(const OpNames&) = delete;

 private:
  at::CallbackHandle handle_ = 0;
};

// "aten::mul"; empty outside of operators and where no OpNames lives.
std::string_view current_op_name();

}  // namespace neap::autograd
