// torch-free
// What a unit's body can say of its backward to whatever brings the unit's parameters there and takes them away again.
//
// An embedding reads its weight in forward alone, and so does a loss that makes its gradients there. Sharding gathers
// no parameters for the backward of such a call.
#pragma once

#include <utility>

namespace neap::autograd {

class HookPoint;

namespace internal {

inline constinit thread_local const HookPoint* t_reads_no_parameters = nullptr;

}  // namespace internal

// In the body of a unit that cannot run again: the backward of this call reads none of the unit's parameters.
inline void backward_reads_no_parameters(const HookPoint& unit) noexcept { internal::t_reads_no_parameters = &unit; }

// Around a unit's body, by the hook that wants to know. One at a time on a thread, or one inside the other.
class ListenForReads {
 public:
  ListenForReads() noexcept : outer_(std::exchange(internal::t_reads_no_parameters, nullptr)) {}
  ~ListenForReads() { internal::t_reads_no_parameters = outer_; }
  ListenForReads(const ListenForReads&) = delete;
  ListenForReads& operator=(const ListenForReads&) = delete;

  // What units inside of it said of themselves does not count.
  bool none(const HookPoint& unit) const noexcept { return internal::t_reads_no_parameters == &unit; }

 private:
  const HookPoint* const outer_;
};

}  // namespace neap::autograd
