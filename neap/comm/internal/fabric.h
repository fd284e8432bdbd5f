// torch-free
// What carries bytes between ranks. Two exist: Gloo between processes (gloo_fabric.h), memory between threads of one
// process (local_fabric.h). Everything above, from headers to reductions, is the same on both.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "neap/base/error.h"
#include "neap/comm/internal/breakable.h"
#include "neap/comm/internal/device_group.h"

namespace neap::comm::internal {

// The peer died or left, or this side called abort(). Never reaches the user: it becomes one of failure.h.
class LinkLost : public Error {
 public:
  using Error::Error;
};

// One message under way.
class Transfer {
 public:
  virtual ~Transfer() = default;  // gives up what is not done; the bytes are not touched afterwards
  // Blocks until a received message is there, or a sent one may be overwritten. Throws LinkLost.
  virtual void wait() = 0;
};

// The links of one rank to the other members of one group. Messages between two members arrive in the order they were
// sent; the receiver knows the size of each. send() and receive() return before the message is through and are called
// by one thread at a time; after abort() all waits throw LinkLost.
class Transport : public Breakable {
 public:
  // `to` and `from` are indices in the group. The bytes must stay until the Transfer is done or gone. Throws LinkLost.
  virtual std::unique_ptr<Transfer> send(int to, std::span<const std::byte> bytes) = 0;
  virtual std::unique_ptr<Transfer> receive(int from, std::span<std::byte> bytes) = 0;
};

// One rank's way into the world.
class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // All of `ranks`, this rank among them, call it with equal arguments. Waits for them; throws LinkLost when they do
  // not come in time. A name is used once.
  virtual std::unique_ptr<Transport> connect(const std::string& name, const std::vector<int>& ranks) = 0;
  // The library that moves the memory of devices which the host cannot reach (CUDA); null where there is none. All of
  // `ranks` call it as connect(), but it may return before the others have.
  virtual std::unique_ptr<DeviceGroup> connect_library(const std::string& /*name*/, const std::vector<int>& /*ranks*/) {
    return nullptr;
  }
  // The first text that any rank of the world has published; that is `text` when none has before. When the others
  // cannot be told any more, `text` and that. Thread-safe.
  virtual std::string publish_failure(const std::string& text) noexcept = 0;
};

}  // namespace neap::comm::internal
