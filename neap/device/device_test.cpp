// The null implementation of a plain CPU, and what does not depend on the device.
#include "neap/device/device.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

#include "neap/base/error.h"
#include "neap/device/copy.h"

namespace neap::device {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

at::Tensor bytes(int64_t size) { return at::arange(size, at::kLong).remainder(251).to(at::kByte); }

TEST(Device, IsOnePerDevice) {
  auto& cpu = Device::of(c10::Device(c10::kCPU));
  EXPECT_EQ(&cpu, &Device::of(at::zeros({1})));
  EXPECT_EQ(&cpu, &Device::of(c10::Device(c10::kCPU, 0)));
  EXPECT_EQ(cpu.c10_device(), c10::Device(c10::kCPU, 0));
}

TEST(Device, IsMadeOnceByManyThreads) {
  std::vector<Device*> found(8);
  std::vector<std::thread> threads;
  for (auto& mine : found) threads.emplace_back([&mine] { mine = &Device::of(c10::Device(c10::kMeta)); });
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(found, testing::Each(found.front()));
}

TEST(Device, NamesATypeThatTorchDoesNotHave) {
  EXPECT_THAT([] { Device::of(c10::Device(c10::kHPU, 0)); }, ThrowsMessage<UserError>(HasSubstr("hpu:0 is a device")));
  EXPECT_THROW(Device::of(c10::Device(c10::kHPU)), UserError);
}

TEST(PlainCpu, IsSynchronousAndCountsNothing) {
  auto& cpu = Device::of(c10::Device(c10::kCPU));
  EXPECT_FALSE(cpu.asynchronous());
  EXPECT_EQ(cpu.memory_stats(), std::nullopt);
  EXPECT_EQ(cpu.capacity(), std::nullopt);
  cpu.reset_peak();
  cpu.synchronize();
  cpu.record_on_stream(at::zeros({1}).storage().data_ptr(), cpu.current_stream());
}

TEST(PlainCpu, HasNullEventsThatHavePassed) {
  auto& cpu = Device::of(c10::Device(c10::kCPU));
  const auto stream = cpu.copy_stream(Direction::kOut);
  EXPECT_EQ(stream, cpu.copy_stream(Direction::kIn));
  const auto event = stream.record();
  EXPECT_TRUE(event.is_null());
  EXPECT_TRUE(event.query());
  event.synchronize();
  stream.wait(event);
  stream.synchronize();
  EXPECT_TRUE(stream.query());
  EXPECT_EQ(Event::elapsed_ns(stream.record_timed(), stream.record_timed()), std::nullopt);
}

TEST(PlainCpu, CopiesBeforeItReturns) {
  const auto source = bytes(1000);
  const auto copy = at::zeros({1000}, at::kByte);
  copy_bytes_async(copy, source, Device::of(source).current_stream());
  EXPECT_TRUE(at::equal(copy, source));
}

TEST(ByteView, SharesTheBytesAndNothingElse) {
  const auto tensor = at::arange(10, at::kFloat).requires_grad_();
  const auto view = byte_view(tensor.storage(), 4, 8);
  EXPECT_EQ(view.scalar_type(), at::kByte);
  EXPECT_EQ(view.numel(), 8);
  EXPECT_EQ(view.data_ptr(), static_cast<char*>(tensor.data_ptr()) + 4);
  EXPECT_FALSE(view.requires_grad());
  const auto version = tensor._version();
  view.zero_();
  EXPECT_EQ(tensor._version(), version);
  EXPECT_EQ(tensor[1].item<float>(), 0);
  EXPECT_EQ(tensor[3].item<float>(), 3);
}

TEST(ByteView, KeepsTheStorageAlive) {
  auto tensor = bytes(64);
  const auto view = byte_view(tensor.storage());
  const auto before = tensor.clone();
  tensor.reset();
  EXPECT_TRUE(at::equal(view, before));
}

TEST(ByteView, RefusesARangeOutsideTheStorage) {
  const auto tensor = bytes(64);
  EXPECT_EQ(byte_view(tensor.storage(), 64, 0).numel(), 0);
  EXPECT_THROW(byte_view(tensor.storage(), 60, 5), InternalError);
  EXPECT_THROW(byte_view(tensor.storage(), -1, 5), InternalError);
  EXPECT_THROW(byte_view(tensor.storage(), 1, INT64_MAX), InternalError);
}

TEST(CopyBytes, RefusesWhatIsNotFlatBytesOfOneSize) {
  const auto stream = Device::of(c10::Device(c10::kCPU)).current_stream();
  EXPECT_THROW(copy_bytes_async(bytes(8), bytes(9), stream), InternalError);
  EXPECT_THROW(copy_bytes_async(at::zeros({2}), bytes(2), stream), InternalError);
  EXPECT_THROW(copy_bytes_async(bytes(8), bytes(8).view({2, 4}), stream), InternalError);
  EXPECT_THROW(copy_bytes_async(bytes(8), at::empty({8}, at::TensorOptions(at::kByte).device(at::kMeta)), stream),
               InternalError);
}

// Both sides of the size from which on the operator moves the bytes.
TEST(CopyBytes, MovesAPieceOfAStorage) {
  const auto stream = Device::of(c10::Device(c10::kCPU)).current_stream();
  for (const int64_t size : {int64_t{6}, int64_t{1} << 20}) {
    const auto source = bytes(size + 10);
    const auto copy = at::zeros({size + 4}, at::kByte);
    const c10::Storage from = source.storage(), to = copy.storage();
    copy_bytes_async({to, 1, size}, {from, 3, size}, stream);
    EXPECT_TRUE(at::equal(copy.narrow(0, 1, size), source.narrow(0, 3, size)));
    EXPECT_EQ(copy[0].item<int>() + copy.narrow(0, size + 1, 3).sum().item<int>(), 0) << "nothing beside it";
    EXPECT_THROW(copy_bytes_async({to, 1, size}, {from, 3, size - 1}, stream), InternalError);
    EXPECT_THROW(copy_bytes_async({to, 5, size}, {from, 3, size}, stream), InternalError);
    EXPECT_THROW(copy_bytes_async({to, 1, size}, {from, 11, size}, stream), InternalError);
  }
}

TEST(CopyBytes, IsReplacedByWhatItsHookThrows) {
  auto& cpu = Device::of(c10::Device(c10::kCPU));
  int64_t seen = 0;
  cpu.set_copy_hook([&](const Copy& copy) {
    seen += copy.bytes.count;
    if (seen > 100) throw std::runtime_error("link down");
  });
  const auto no_hook = c10::make_scope_exit([&] { cpu.set_copy_hook({}); });
  const auto source = bytes(80);
  const auto copy = at::zeros({80}, at::kByte);
  copy_bytes_async(copy, source, cpu.current_stream());
  EXPECT_TRUE(at::equal(copy, source));
  copy.zero_();
  EXPECT_THROW(copy_bytes_async(copy, source, cpu.current_stream()), std::runtime_error);
  EXPECT_TRUE(at::equal(copy, at::zeros_like(copy))) << "copied although the hook threw";
}

TEST(Clock, IsTheSteadyClockUnlessOneIsSet) {
  auto& cpu = Device::of(c10::Device(c10::kCPU));
  const auto before = cpu.now_ns();
  EXPECT_GE(cpu.now_ns(), before);
  set_clock(c10::kCPU, [](c10::DeviceIndex index) { return int64_t{1000} + index; });
  EXPECT_EQ(cpu.now_ns(), 1000);
  set_clock(c10::kCPU, {});
  EXPECT_GE(cpu.now_ns(), before);
}

}  // namespace
}  // namespace neap::device
