// torch-free
// A collective that was started. Movable only; may be dropped at any time.
//
// On a CPU the collective runs on a thread of its Group and wait() blocks the caller until it is done. On an
// asynchronous device it runs on the device's collective stream and wait() makes the current stream wait, which returns
// at once. In both cases what is enqueued or done after wait() sees the result.
//
// Until it is done or waited for, a Work holds references to the tensors that the collective reads and writes; dropped
// before wait(), it hands that duty on (to the group's thread, or to the device's allocator). The contents must stay as
// they are until wait(). One thread at a time.
#pragma once

#include <memory>

namespace neap::comm {

namespace internal {
class WorkState;
}

class Work {
 public:
  Work() noexcept;  // a collective that is done
  explicit Work(std::shared_ptr<internal::WorkState> state) noexcept;
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();

  // See above. Throws what ended the collective (failure.h); on an asynchronous device only when that is known already,
  // else synchronize() or the next collective of the world throws it. More calls do nothing more.
  void wait();
  // Blocks the host until the collective is done, whatever the device. Throws what ended it.
  void synchronize();
  // True when the collective has ended, well or not. Never blocks. Real time, not a simulated device's.
  [[nodiscard]] bool done() const;

 private:
  std::shared_ptr<internal::WorkState> state_;
};

}  // namespace neap::comm
