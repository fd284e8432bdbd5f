// One operator on device memory, run by the CPU's kernel.
//
// The protocol: alias() every tensor argument, begin(), run the kernel on the aliases, produced() what it returned,
// finish(), then pass what it returned through result(). The kernel writes straight into device memory; nothing is
// copied. Not thread-safe: lives on the stack of one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <unordered_map>

#include "neap/sim/torch/alias.h"
#include "neap/sim/torch/op_plan.h"

namespace neap::sim {

// Position by address: linear while it is short, as in almost every call; hashed for the lists of foreach operators.
class AddressIndex {
 public:
  int find(const void* address) const;  // -1 when absent
  void add(const void* address);        // its position is the number of addresses added before

 private:
  static constexpr std::size_t kLinear = 16;
  c10::SmallVector<const void*, 8> addresses_;
  std::unordered_map<const void*, int> positions_;  // filled once there are more than kLinear
};

class CpuCall {
 public:
  // `takes_cpu_tensors`: CPU tensors with dimensions may be mixed in; zero-dimensional ones always may.
  explicit CpuCall(const char* name, bool takes_cpu_tensors = false)
      : name_(name), takes_cpu_tensors_(takes_cpu_tensors) {}

  // The CPU tensor to hand to the kernel. Throws where tensors of different devices meet.
  at::Tensor alias(const at::Tensor& tensor, OpPlan::Use use);

  // The device the call runs on, for calls whose arguments name one.
  void set_device(int device) {
    if (device_ < 0) device_ = device;
  }
  int device() const { return device_; }

  // Waits for what the current stream has queued: from here to finish() the kernel owns the memory of its arguments.
  void begin();

  // A tensor the kernel returned: memory that it wrote, unless it is an alias.
  void produced(const at::Tensor& tensor);

  // Accounts for the kernel (clock, hazards, counters), and carries over what it did to the metadata and the memory of
  // the tensors it wrote: an out= that grew, set_().
  void finish(double flops);
  // As a host must that needs the result before it can go on.
  void synchronize();

  // What the caller gets for a tensor that the kernel returned: the original of an alias, a view of the original for a
  // view of an alias, and for anything new its memory adopted by the device.
  at::Tensor result(const at::Tensor& tensor);

 private:
  struct SharedStorage {
    c10::Storage original, alias;
  };
  struct Argument {
    at::Tensor original, alias;
    bool written;
  };

  void note(const at::Tensor& tensor, OpPlan::Use use);
  void commit();
  const c10::Storage& alias_of(const c10::Storage& storage);
  void check_device(const at::Tensor& tensor);
  void commit_storage(const Argument& argument);

  const char* name_;
  bool takes_cpu_tensors_;
  int device_ = -1;
  double bytes_ = 0;
  c10::SmallVector<Range, 8> ranges_;
  c10::SmallVector<SharedStorage, 6> storages_;
  AddressIndex originals_, aliases_;  // of storages_
  c10::SmallVector<Argument, 6> arguments_;
  AddressIndex tensors_;  // of arguments_
};

}  // namespace neap::sim
