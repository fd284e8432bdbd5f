// torch-free
// What a failure of the world cuts, so that nobody waits for ranks that are gone.
#pragma once

namespace neap::comm::internal {

class Breakable {
 public:
  virtual ~Breakable() = default;
  // Ends what runs and everything after it with an error, here and soon at the peers. Idempotent. Any thread.
  virtual void abort() noexcept = 0;
};

}  // namespace neap::comm::internal
