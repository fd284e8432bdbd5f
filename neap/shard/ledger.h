// torch-free
// What the groups of a sharded model hold on this rank at any time, and word of every change before it happens;
// internal to the layer. Whoever wants to know what a peak of device memory was made of looks just before the state
// changes: in between it is known to the byte. One thread at a time, as the groups.
#pragma once

#include <functional>
#include <utility>

#include "neap/base/bytes.h"

namespace neap::shard {

struct Held {
  Bytes parameters;  // shards and full parameters
  Bytes gradients;   // full gradients and pieces of them
};

class Ledger {
 public:
  const Held& held() const { return held_; }
  // Of one group.
  void change(const Held& from, const Held& to) noexcept {
    held_.parameters += to.parameters - from.parameters;
    held_.gradients += to.gradients - from.gradients;
  }

  // `look` is called before memory comes or goes, on the thread that runs the unit, and must not throw. Empty: nobody
  // looks, and held() is not kept up to date.
  void watch(std::function<void()> look) { look_ = std::move(look); }
  bool watched() const { return static_cast<bool>(look_); }
  void look() const {
    if (look_) look_();
  }

 private:
  Held held_;
  std::function<void()> look_;
};

}  // namespace neap::shard
