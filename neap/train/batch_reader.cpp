#include "neap/train/batch_reader.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "neap/train/read_ahead.h"

namespace neap::train {
namespace {

// Null where the device has no pinned memory: copies wait then, but are right.
at::HostAllocator* find_host_allocator(c10::Device device) {
  try {
    return device.is_cpu() ? nullptr : at::getHostAllocator(device.type());
  } catch (const c10::Error&) {  // how torch says that there is none
    return nullptr;
  }
}

// Pinned memory is given out again only after copies from it are over: its allocator sees to that.
at::Tensor host_tensor(int64_t rows, int64_t columns, c10::Device device) {
  at::HostAllocator* allocator = find_host_allocator(device);
  if (allocator == nullptr) return at::empty({rows, columns}, at::kLong);
  // Locking memory must not create a context on another device.
  const c10::OptionalDeviceGuard guard(device);
  const auto bytes = static_cast<size_t>(rows * columns) * sizeof(int64_t);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes, allocator->allocate(bytes));
  return at::empty({0}, at::kLong).set_(std::move(storage), 0, {rows, columns});
}

Batch read_batch(const Sequences& sequences, const BatchReader::Options& options, int64_t position) {
  Batch batch{.inputs = host_tensor(options.batch, options.sequence, options.device),
              .labels = host_tensor(options.batch, options.sequence, options.device)};
  const auto tokens = static_cast<size_t>(options.batch * options.sequence);
  sequences.read(position, {batch.inputs.mutable_data_ptr<int64_t>(), tokens},
                 {batch.labels.mutable_data_ptr<int64_t>(), tokens});
  return batch;
}

// Here, where it keeps nobody waiting: it touches all the tokens of the step.
int64_t learned_in_step(const Sequences& sequences, const BatchReader::Options& options, int64_t position) {
  int64_t count = 0;
  for (int64_t i = 0; i < options.step; ++i) {
    count += sequences.learned(position + i * options.stride, options.batch);
  }
  return count;
}

}  // namespace

BatchReader::BatchReader(const Sequences& sequences, Options options) : sequences_(sequences), options_(options) {}

BatchReader::~BatchReader() = default;

Batch BatchReader::read(int64_t position) {
  if (ahead_ == nullptr || position != next_) {
    waited_ = waited();
    ahead_ = std::make_unique<ReadAhead<Batch>>(
        [&sequences = sequences_, options = options_, position](int64_t i) {
          const int64_t here = position + i * options.stride;
          Batch batch = read_batch(sequences, options, here);
          if (i % options.step == 0) batch.learned = learned_in_step(sequences, options, here);
          return batch;
        },
        0, options_.ahead);
  }
  Batch batch = ahead_->next();
  next_ = position + options_.stride;
  return batch;
}

std::chrono::nanoseconds BatchReader::waited() const noexcept {
  return waited_ + (ahead_ != nullptr ? ahead_->waited() : std::chrono::nanoseconds(0));
}

}  // namespace neap::train
