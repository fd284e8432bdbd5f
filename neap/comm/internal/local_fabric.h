// torch-free
// Ranks as threads of one process: messages are one memcpy from the sender's memory to the receiver's, made by
// whichever of the two comes second.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "neap/base/mutex.h"
#include "neap/comm/internal/fabric.h"

namespace neap::comm::internal {

class LocalGroup;

// Where the ranks of one world meet. Thread-safe.
class LocalHub {
 public:
  LocalHub(int size, std::chrono::nanoseconds timeout) : size_(size), timeout_(timeout) {}

  [[nodiscard]] int size() const { return size_; }
  // Waits for the other members. Once one of them has given up, or the world has failed, all throw LinkLost: a member
  // that came later would wait for one that never made its links.
  std::shared_ptr<LocalGroup> join(const std::string& name, size_t members) NEAP_EXCLUDES(mutex_);
  std::string publish_failure(const std::string& text) NEAP_EXCLUDES(mutex_);

 private:
  const int size_;
  const std::chrono::nanoseconds timeout_;
  Mutex mutex_;
  CondVar changed_;
  struct Meeting {
    std::shared_ptr<LocalGroup> group;
    size_t arrived = 0;
    bool given_up = false;
  };
  std::map<std::string, Meeting> meetings_ NEAP_GUARDED_BY(mutex_);
  std::string failure_ NEAP_GUARDED_BY(mutex_);
};

class LocalFabric final : public Fabric {
 public:
  LocalFabric(std::shared_ptr<LocalHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  std::unique_ptr<Transport> connect(const std::string& name, const std::vector<int>& ranks) override;
  std::string publish_failure(const std::string& text) noexcept override { return hub_->publish_failure(text); }

 private:
  std::shared_ptr<LocalHub> hub_;
  int rank_;
};

}  // namespace neap::comm::internal
