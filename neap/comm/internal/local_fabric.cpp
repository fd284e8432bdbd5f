// torch-free
#include "neap/comm/internal/local_fabric.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

namespace neap::comm::internal {
namespace {

using neap::internal::concat;

// One direction between two members. A transfer waits here until the other side posts its half.
class Channel {
 public:
  struct Half {
    std::byte* bytes = nullptr;
    size_t size = 0;
    bool done = false;
    bool lost = false;
  };

  void post(Half& half, bool sending) {
    MutexLock lock(mutex_);
    auto& others = sending ? wanted_ : offered_;
    if (others.empty()) {
      half.lost = closed_;
      if (!closed_) (sending ? offered_ : wanted_).push_back(&half);
      return;
    }
    Half& other = *others.front();
    others.pop_front();
    NEAP_ASSERT(half.size == other.size, "a message of ", half.size, " bytes meets one of ", other.size);
    std::memcpy(sending ? other.bytes : half.bytes, sending ? half.bytes : other.bytes, half.size);
    half.done = other.done = true;
    changed_.notify_all();
  }

  void wait(const Half& half) {
    MutexLock lock(mutex_);
    changed_.wait(mutex_, [&] { return half.done || half.lost; });
    if (half.lost) throw LinkLost("it left");
  }

  void forget(const Half& half) noexcept {
    MutexLock lock(mutex_);
    std::erase(offered_, &half);
    std::erase(wanted_, &half);
  }

  void close() noexcept {
    MutexLock lock(mutex_);
    closed_ = true;
    for (auto* queue : {&offered_, &wanted_}) {
      for (Half* half : *queue) half->lost = true;
      queue->clear();
    }
    changed_.notify_all();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool closed_ NEAP_GUARDED_BY(mutex_) = false;
  std::deque<Half*> offered_ NEAP_GUARDED_BY(mutex_);  // sends without a receiver yet
  std::deque<Half*> wanted_ NEAP_GUARDED_BY(mutex_);   // and the reverse
};

class LocalTransfer final : public Transfer {
 public:
  LocalTransfer(Channel& channel, std::byte* bytes, size_t size, bool sending) : channel_(channel) {
    half_.bytes = bytes;
    half_.size = size;
    channel.post(half_, sending);
  }
  ~LocalTransfer() override { channel_.forget(half_); }
  LocalTransfer(const LocalTransfer&) = delete;
  LocalTransfer& operator=(const LocalTransfer&) = delete;

  void wait() override { channel_.wait(half_); }

 private:
  Channel& channel_;
  Channel::Half half_;  // guarded by the channel
};

}  // namespace

class LocalGroup {
 public:
  explicit LocalGroup(size_t members) : members_(members), channels_(members * members) {}

  [[nodiscard]] size_t members() const { return members_; }
  Channel& channel(size_t from, size_t to) { return channels_[from * members_ + to]; }

 private:
  const size_t members_;
  std::vector<Channel> channels_;
};

namespace {

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<LocalGroup> group, size_t index) : group_(std::move(group)), index_(index) {}
  ~LocalTransport() override { LocalTransport::abort(); }
  LocalTransport(const LocalTransport&) = delete;
  LocalTransport& operator=(const LocalTransport&) = delete;

  std::unique_ptr<Transfer> send(int to, std::span<const std::byte> bytes) override {
    auto* data = const_cast<std::byte*>(bytes.data());  // the sending half is only read
    return std::make_unique<LocalTransfer>(group_->channel(index_, static_cast<size_t>(to)), data, bytes.size(), true);
  }
  std::unique_ptr<Transfer> receive(int from, std::span<std::byte> bytes) override {
    return std::make_unique<LocalTransfer>(group_->channel(static_cast<size_t>(from), index_), bytes.data(),
                                           bytes.size(), false);
  }
  void abort() noexcept override {
    for (size_t peer = 0; peer < group_->members(); ++peer) {
      group_->channel(index_, peer).close();
      group_->channel(peer, index_).close();
    }
  }

 private:
  std::shared_ptr<LocalGroup> group_;
  const size_t index_;
};

}  // namespace

std::shared_ptr<LocalGroup> LocalHub::join(const std::string& name, size_t members) {
  MutexLock lock(mutex_);
  Meeting& meeting = meetings_[name];
  if (meeting.group == nullptr) meeting.group = std::make_shared<LocalGroup>(members);
  const bool open = !meeting.given_up && failure_.empty();
  meeting.arrived += open ? 1 : 0;
  changed_.notify_all();
  const auto complete = [&] { return meeting.arrived == members; };
  if (open)
    changed_.wait_for(mutex_, timeout_,
                      [&]() NEAP_REQUIRES(mutex_) { return complete() || meeting.given_up || !failure_.empty(); });
  if (complete()) return meeting.group;
  meeting.given_up = true;
  changed_.notify_all();
  throw LinkLost(failure_.empty() ? concat("only ", meeting.arrived, " of ", members, " ranks came")
                                  : "another rank failed");
}

std::string LocalHub::publish_failure(const std::string& text) {
  MutexLock lock(mutex_);
  if (failure_.empty()) failure_ = text;
  changed_.notify_all();
  return failure_;
}

std::unique_ptr<Transport> LocalFabric::connect(const std::string& name, const std::vector<int>& ranks) {
  const auto me = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
  return std::make_unique<LocalTransport>(hub_->join(name, ranks.size()), static_cast<size_t>(me));
}

}  // namespace neap::comm::internal
