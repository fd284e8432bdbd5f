// The one file that knows ProcessGroupGloo. torch's wheels export the class but ship none of Gloo's headers, so it is
// compiled against the declarations in neap/comm/gloo_shim/ (see its README).
#include "neap/comm/internal/gloo_fabric.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "neap/base/mutex.h"
#include "neap/comm/cuda/nccl_group.h"
#include "neap/comm/failure.h"

namespace neap::comm::internal {
namespace {

using neap::internal::concat;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr int kTag = 0;  // messages of a pair are told apart by their order
constexpr const char* kFailureKey = "failure";

// "[…/pair.cc:553] Connection closed by peer\nmore" → "Connection closed by peer"
std::string reason(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  const auto place = text.find("] ");
  return text.starts_with("[") && place != std::string::npos ? text.substr(place + 2) : text;
}

// ---- transport

class GlooTransport final : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<c10d::ProcessGroupGloo> group, std::chrono::milliseconds timeout)
      : group_(std::move(group)), timeout_(timeout) {}

  std::unique_ptr<Transfer> send(int to, std::span<const std::byte> bytes) override {
    return post(bytes, [&](std::vector<at::Tensor>& flat) { return group_->send(flat, to, kTag); });
  }
  std::unique_ptr<Transfer> receive(int from, std::span<std::byte> bytes) override {
    return post(bytes, [&](std::vector<at::Tensor>& flat) { return group_->recv(flat, from, kTag); });
  }
  void abort() noexcept override {
    MutexLock lock(mutex_);
    aborted_ = true;
    for (c10d::Work* work : live_) work->abort();
    close_if_unused();
  }

 private:
  class Message final : public Transfer {
   public:
    Message(GlooTransport& transport, c10::intrusive_ptr<c10d::Work> work)
        : transport_(transport), work_(std::move(work)) {}
    ~Message() override { transport_.forget(std::move(work_)); }
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;

    void wait() override {
      bool done = false;
      try {
        done = work_->wait(transport_.timeout_);
      } catch (const std::exception& error) {
        throw LinkLost(reason(error));
      }
      if (!done) throw LinkLost("this rank cut its links");
    }

   private:
    GlooTransport& transport_;
    c10::intrusive_ptr<c10d::Work> work_;
  };

  template <class Post>
  std::unique_ptr<Transfer> post(std::span<const std::byte> bytes, Post start) {
    // c10d wants tensors. This one owns nothing, and a sent one is only read.
    std::vector<at::Tensor> flat{
        at::from_blob(const_cast<std::byte*>(bytes.data()), {static_cast<int64_t>(bytes.size())}, at::kByte)};
    MutexLock lock(mutex_);
    if (aborted_) throw LinkLost("this rank cut its links");
    try {
      auto work = start(flat);
      live_.insert(work.get());
      return std::make_unique<Message>(*this, std::move(work));
    } catch (const std::exception& error) {
      throw LinkLost(reason(error));
    }
  }

  void forget(c10::intrusive_ptr<c10d::Work> work) noexcept {
    MutexLock lock(mutex_);
    live_.erase(work.get());
    work.reset();
    if (aborted_) close_if_unused();
  }

  // Closing the connections is what the peers notice. Not under a message that is still under way.
  void close_if_unused() NEAP_REQUIRES(mutex_) {
    if (live_.empty()) group_.reset();
  }

  Mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_ NEAP_GUARDED_BY(mutex_);
  const std::chrono::milliseconds timeout_;
  bool aborted_ NEAP_GUARDED_BY(mutex_) = false;
  std::set<c10d::Work*> live_ NEAP_GUARDED_BY(mutex_);
};

// ---- store

// Servers live as long as the process: a second World of the same process meets at the same store, and a rank that
// still reads from it must not lose it. Leaked on purpose, for its thread may run while statics are destroyed.
struct Stores {
  Mutex mutex;
  std::map<std::string, StorePtr> by_address NEAP_GUARDED_BY(mutex);
};

StorePtr make_store(const Launch& launch, std::chrono::milliseconds timeout, bool may_serve) {
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = may_serve && !launch.agent_store && launch.rank == 0;
  // The agent's store counts other clients than the ranks, and the second connection of a rank is nobody to wait for.
  options.waitWorkers = may_serve && !launch.agent_store;
  if (options.waitWorkers) options.numWorkers = static_cast<size_t>(launch.world);
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(launch.address, options);
  } catch (const std::exception& error) {
    const std::string where = concat(launch.address, ":", launch.port);
    if (options.isServer)
      NEAP_USER_ERROR("[comm] rank 0 expected to serve the store of ", launch.world, " ranks at ", where,
                      " and to see all of them within ", timeout.count(), " ms; found: ", reason(error),
                      "; choose a free MASTER_PORT, and see the logs of ranks that did not come");
    throw RankFailure(concat("[comm] rank ", launch.rank, " expected the store of ",
                             launch.agent_store ? "the launcher" : "rank 0", " at ", where, " to answer within ",
                             timeout.count(), " ms; found: ", reason(error), "; check MASTER_ADDR and MASTER_PORT"));
  }
}

StorePtr shared_store(const Launch& launch, std::chrono::milliseconds timeout) {
  static auto* stores = new Stores;
  MutexLock lock(stores->mutex);
  auto& store = stores->by_address[concat(launch.address, ":", launch.port)];
  if (store == nullptr) store = make_store(launch, timeout, /*may_serve=*/true);
  return store;
}

std::shared_ptr<::gloo::transport::Device> make_device(const Launch& launch, const std::string& interface) {
  const char* stated = std::getenv("GLOO_SOCKET_IFNAME");
  if (!interface.empty()) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (stated != nullptr && *stated != '\0') return c10d::ProcessGroupGloo::createDeviceForInterface(stated);
  // One host needs no network, nor a name that resolves.
  if (launch.local_world == launch.world) return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

// Where the members of a group find each other's addresses. Waiting for one ends early when the world has failed: the
// rank that would give it may have left without ever coming here.
class MeetingStore final : public c10d::PrefixStore {
 public:
  MeetingStore(const std::string& prefix, StorePtr store, StorePtr failures)
      : PrefixStore(prefix, std::move(store)), failures_(std::move(failures)) {}

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (auto pause = kShortest; !check(keys); pause = std::min(2 * pause, kLongest)) {
      if (failures_->check({kFailureKey})) throw LinkLost("another rank failed");
      if (Clock::now() >= deadline) throw LinkLost("an address is missing");
      std::this_thread::sleep_for(pause);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  // It asks again and again: c10d writes a warning for every wait that is given up.
  static constexpr std::chrono::milliseconds kShortest{1}, kLongest{64};

  const StorePtr failures_;
};

// How long to wait for a store that does not answer.
constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(10);

class GlooFabric final : public Fabric {
 public:
  GlooFabric(const Launch& launch, const WorldOptions& options) : GlooFabric(launch, options, nullptr, nullptr) {
    // Every world of the ranks' processes, and every restart of them, has keys of its own.
    static std::atomic<int> worlds{0};
    const std::string prefix = concat("neap/", launch.run_id, "/", launch.restart, "/", worlds++);
    store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, shared_store(launch, options.timeout));
    // A connection of its own: on the shared one, whoever waits for a key keeps the others out.
    failures_ = c10::make_intrusive<c10d::PrefixStore>(prefix, make_store(launch, patience_, /*may_serve=*/false));
  }
  GlooFabric(const Launch& launch, const WorldOptions& options, StorePtr store, StorePtr failures)
      : launch_(launch),
        options_(options),
        patience_(std::min(options.timeout, kPatience)),
        store_(std::move(store)),
        failures_(std::move(failures)) {}

  int rank() const override { return launch_.rank; }
  int size() const override { return launch_.world; }

  std::unique_ptr<Transport> connect(const std::string& name, const std::vector<int>& ranks) override {
    const auto me = static_cast<int>(std::find(ranks.begin(), ranks.end(), launch_.rank) - ranks.begin());
    auto options = c10d::ProcessGroupGloo::Options::create(options_.timeout);
    options->threads = 1;  // for Gloo's own collectives, which are not used
    try {
      options->devices.push_back(make_device(launch_, options_.interface));
      auto meeting = c10::make_intrusive<MeetingStore>(name, store_, failures_);
      auto group =
          c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(meeting), me, static_cast<int>(ranks.size()), options);
      // The watchdog ends collectives that are late. This limit only keeps Gloo's own, the same, from being first: it
      // would cut the links before the reason is published.
      return std::make_unique<GlooTransport>(std::move(group), options_.timeout + std::chrono::minutes(1));
    } catch (const std::exception& error) {
      throw LinkLost(concat("they did not all come within ", options_.timeout.count(), " ms: ", reason(error)));
    }
  }

  std::unique_ptr<DeviceGroup> connect_library(const std::string& name, const std::vector<int>& ranks) override {
    if (!cuda::has_nccl()) return nullptr;
    const auto me = static_cast<int>(std::find(ranks.begin(), ranks.end(), launch_.rank) - ranks.begin());
    return cuda::connect_nccl(c10::make_intrusive<MeetingStore>(name, store_, failures_), me,
                              static_cast<int>(ranks.size()), options_.timeout);
  }

  std::string publish_failure(const std::string& text) noexcept override {
    const std::string alone =
        concat(text, launch_.agent_store ? "; the launcher" : "; rank 0", ", which serves the store, does not answer");
    try {
      // A store whose process is dead answers with an error, one whose process or host is stuck with nothing. Then the
      // thread is left to wait for it.
      auto answer = std::make_shared<std::promise<std::string>>();
      auto first = answer->get_future();
      std::thread([answer, text, alone, store = failures_] {
        try {
          const auto value = store->compareSet(kFailureKey, {}, std::vector<uint8_t>(text.begin(), text.end()));
          answer->set_value({value.begin(), value.end()});
        } catch (const std::exception&) {
          answer->set_value(alone);
        }
      }).detach();
      return first.wait_for(patience_) == std::future_status::ready ? first.get() : alone;
    } catch (const std::exception&) {
      return alone;
    }
  }

 private:
  const Launch launch_;
  const WorldOptions options_;
  const std::chrono::milliseconds patience_;  // with a store that does not answer
  StorePtr store_, failures_;
};

// The store's server answers clients that may have died, through a library that does not ask for MSG_NOSIGNAL. By
// default that signal would end the rank which serves it, without a word. Python and others ignore it anyhow.
void ignore_broken_pipes() {
  struct sigaction now {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::unique_ptr<Fabric> make_gloo_fabric(const Launch& launch, const WorldOptions& options) {
  ignore_broken_pipes();
  return std::make_unique<GlooFabric>(launch, options);
}

std::unique_ptr<Fabric> make_gloo_fabric(const StorePtr& store, const Launch& launch, const WorldOptions& options) {
  ignore_broken_pipes();
  try {
    StorePtr own = store->clone(), failures = store->clone();
    own->setTimeout(options.timeout);
    failures->setTimeout(std::min(options.timeout, kPatience));
    return std::make_unique<GlooFabric>(launch, options, std::move(own), std::move(failures));
  } catch (const std::exception& error) {
    throw RankFailure(concat("[comm] rank ", launch.rank, " expected the ranks' store to take another connection; ",
                             "found: ", reason(error)));
  }
}

}  // namespace neap::comm::internal
