// What Neaptide expects of a device, as tests over c10's device-generic interfaces: streams, events, copies, memory.
// Written once; a device runs it by instantiating it in one of its test files:
//
//   INSTANTIATE_TYPED_TEST_SUITE_P(Sim, DeviceContract, SimDevice);
//
// A device is a struct with
//   Fixture           a gtest fixture that makes the device usable, or skips
//   kType             its c10::DeviceType
//   hold_copies()     an object with resume(): until then, or until it dies, copies to and from the host do not finish.
//                     A real device can only make this likely (a long queue); then kHoldsExactly is false, and the
//                     tests do not look at what has *not* happened yet.
//
// Include it in one file per test program: it defines tests.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <thread>

#include "testing/matchers.h"

namespace neap::testing {

template <class DeviceUnderTest>
class DeviceContract : public DeviceUnderTest::Fixture {
 protected:
  static constexpr auto kType = DeviceUnderTest::kType;
  static constexpr int64_t kElements = 1 << 18;

  static c10::Device device() { return {kType, 0}; }
  static at::TensorOptions on_device() { return at::TensorOptions().device(device()); }
  static c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(kType); }
  static c10::Stream side_stream() { return guard().getStreamFromGlobalPool(device()); }
  static c10::Stream default_stream() { return guard().getDefaultStream(device()); }
  static at::Tensor pinned_like(const at::Tensor& t) {
    return at::empty(t.sizes(), at::TensorOptions().dtype(t.scalar_type()).pinned_memory(true));
  }
  static at::Tensor ramp(int64_t first = 0) { return at::arange(first, first + kElements, at::kInt); }
  // What has not happened yet can be looked at only where the device can be held.
  static void expect_unfinished(bool finished) {
    if (DeviceUnderTest::kHoldsExactly) {
      EXPECT_FALSE(finished);
    }
  }

  // Copies on `stream` once it has passed what the default stream has queued; the event is done when the copy is.
  static c10::Event copy_on(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from) {
    c10::Event ready(kType), done(kType);
    ready.record(default_stream());
    const c10::StreamGuard on(stream);
    ready.block(stream);
    to.copy_(from, /*non_blocking=*/true);
    done.record(stream);
    return done;
  }
};

TYPED_TEST_SUITE_P(DeviceContract);

// ---- streams

TYPED_TEST_P(DeviceContract, ThreadsStartOnTheDefaultStreamAndHaveACurrentOneEach) {
  const auto guard = this->guard();
  const auto side = this->side_stream();
  EXPECT_EQ(guard.getStream(this->device()), this->default_stream());
  {
    const c10::StreamGuard on(side);
    EXPECT_EQ(guard.getStream(this->device()), side);
    std::thread([&] { EXPECT_EQ(guard.getStream(this->device()), this->default_stream()); }).join();
  }
  EXPECT_EQ(guard.getStream(this->device()), this->default_stream());
}

TYPED_TEST_P(DeviceContract, PoolStreamsAreNotTheDefaultStream) {
  for (int i = 0; i < 8; ++i) {
    EXPECT_NE(this->side_stream(), this->default_stream());
    EXPECT_NE(this->guard().getStreamFromGlobalPool(this->device(), /*isHighPriority=*/true), this->default_stream());
  }
}

TYPED_TEST_P(DeviceContract, AStreamIsBusyUntilItsWorkIsDone) {
  const auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  const auto side = this->side_stream();
  auto held = TypeParam::hold_copies();
  const auto done = this->copy_on(side, host, x);
  this->expect_unfinished(side.query());
  EXPECT_TRUE(this->default_stream().query());
  held.resume();
  side.synchronize();
  EXPECT_TRUE(side.query());
  EXPECT_TRUE(bit_equal(host, this->ramp()));
}

TYPED_TEST_P(DeviceContract, OneStreamKeepsTheOrderOfItsWork) {
  const auto first = this->ramp(1).to(this->device()), second = this->ramp(2).to(this->device());
  const auto host = this->pinned_like(first);
  const auto side = this->side_stream();
  auto held = TypeParam::hold_copies();
  this->copy_on(side, host, first);
  const auto done = this->copy_on(side, host, second);
  held.resume();
  done.synchronize();
  EXPECT_TRUE(bit_equal(host, this->ramp(2)));
}

TYPED_TEST_P(DeviceContract, AKernelFollowsTheWorkOfItsStream) {
  const auto source = this->pinned_like(this->ramp());
  source.copy_(this->ramp());
  auto held = TypeParam::hold_copies();
  const auto x = at::zeros({this->kElements}, this->on_device().dtype(at::kInt));
  x.copy_(source, /*non_blocking=*/true);
  held.resume();
  EXPECT_TRUE(bit_equal(x + 1, this->ramp(1)));
}

TYPED_TEST_P(DeviceContract, SynchronizingTheDeviceWaitsForEveryStream) {
  const auto x = this->ramp().to(this->device());
  const auto a = this->pinned_like(x), b = this->pinned_like(x);
  auto held = TypeParam::hold_copies();
  const auto first = this->copy_on(this->side_stream(), a, x), second = this->copy_on(this->side_stream(), b, x);
  held.resume();
  this->guard().synchronizeDevice(0);
  EXPECT_TRUE(first.query() && second.query());
  EXPECT_TRUE(bit_equal(a, this->ramp()) && bit_equal(b, this->ramp()));
}

// ---- events

TYPED_TEST_P(DeviceContract, AnEventThatWasNeverRecordedIsDoneAndHoldsNobodyUp) {
  c10::Event never(this->kType);
  EXPECT_TRUE(never.query());
  never.block(this->default_stream());
  never.synchronize();
  EXPECT_TRUE(this->default_stream().query());
}

TYPED_TEST_P(DeviceContract, AnEventIsDoneWhenTheWorkBeforeItIs) {
  const auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  auto held = TypeParam::hold_copies();
  const auto done = this->copy_on(this->side_stream(), host, x);
  this->expect_unfinished(done.query());
  held.resume();
  done.synchronize();
  EXPECT_TRUE(done.query());
  EXPECT_TRUE(bit_equal(host, this->ramp()));
}

TYPED_TEST_P(DeviceContract, AWaitMeansTheRecordingThatHadBeenMade) {
  const auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  const auto slow = this->side_stream(), idle = this->side_stream(), waiter = this->side_stream();
  auto held = TypeParam::hold_copies();
  auto event = this->copy_on(slow, host, x);
  event.block(waiter);
  event.record(idle);  // must not release the waiter
  EXPECT_TRUE(event.query());
  this->expect_unfinished(waiter.query());
  held.resume();
  waiter.synchronize();
  EXPECT_TRUE(slow.query());
  EXPECT_TRUE(bit_equal(host, this->ramp()));
}

TYPED_TEST_P(DeviceContract, AWaitDoesNotReachForLaterRecordings) {
  const auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  const auto slow = this->side_stream(), waiter = this->side_stream();
  c10::Event event(this->kType);
  event.record(this->default_stream());
  event.block(waiter);
  auto held = TypeParam::hold_copies();
  const auto done = this->copy_on(slow, host, x);
  event.record(slow);
  waiter.synchronize();  // would hang if it waited for the copy
  this->expect_unfinished(event.query());
  held.resume();
  event.synchronize();
  EXPECT_TRUE(done.query());
}

TYPED_TEST_P(DeviceContract, AStreamThatWaitsStartsNothingBefore) {
  const auto source = this->pinned_like(this->ramp()), back = this->pinned_like(this->ramp());
  source.copy_(this->ramp());
  const auto x = at::zeros({this->kElements}, this->on_device().dtype(at::kInt));
  const auto in = this->side_stream(), out = this->side_stream();
  auto held = TypeParam::hold_copies();
  const auto loaded = this->copy_on(in, x, source);
  loaded.block(out);
  const auto stored = this->copy_on(out, back, x);
  this->expect_unfinished(stored.query());
  held.resume();
  stored.synchronize();
  EXPECT_TRUE(loaded.query());
  EXPECT_TRUE(bit_equal(back, this->ramp()));
  loaded.block(this->default_stream());
}

TYPED_TEST_P(DeviceContract, TimeBetweenEventsCoversTheWorkBetweenThem) {
  const auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  c10::Event before(this->kType, c10::EventFlag::BACKEND_DEFAULT), after(this->kType, c10::EventFlag::BACKEND_DEFAULT);
  const auto stream = this->default_stream();
  before.record(stream);
  host.copy_(x, /*non_blocking=*/true);
  after.record(stream);
  after.synchronize();
  EXPECT_GT(before.elapsedTime(after), 0);
  EXPECT_LE(after.elapsedTime(before), 0);
}

TYPED_TEST_P(DeviceContract, AMovedEventIsTheSameEvent) {
  const auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  auto held = TypeParam::hold_copies();
  auto made = this->copy_on(this->side_stream(), host, x);
  const c10::Event moved = std::move(made);
  this->expect_unfinished(moved.query());
  held.resume();
  moved.synchronize();
  EXPECT_TRUE(bit_equal(host, this->ramp()));
}

// ---- copies

TYPED_TEST_P(DeviceContract, CopiesWithPinnedMemoryDoNotHoldTheHostUp) {
  const auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  host.fill_(-1);
  auto held = TypeParam::hold_copies();
  const auto done = this->copy_on(this->side_stream(), host, x);  // returns although nothing can move
  this->expect_unfinished(done.query());
  held.resume();
  done.synchronize();
  const auto y = at::empty_like(x);
  this->copy_on(this->side_stream(), y, host).block(this->default_stream());
  EXPECT_TRUE(bit_equal(y, this->ramp()));
}

TYPED_TEST_P(DeviceContract, CopiesToPageableMemoryAreCompleteOnReturn) {
  const auto x = this->ramp().to(this->device());
  const auto host = at::empty({this->kElements}, at::kInt);
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_TRUE(bit_equal(host, this->ramp()));
}

TYPED_TEST_P(DeviceContract, CopiesConvertAndChangeLayout) {
  const auto matrix = this->ramp().view({512, -1});
  const auto x = matrix.to(this->device());
  EXPECT_TRUE(bit_equal(x.t().cpu(), matrix.t()));
  EXPECT_TRUE(bit_equal(matrix.t().to(this->device()), matrix.t()));
  EXPECT_TRUE(bit_equal(x.to(at::kCPU, at::kFloat), matrix.to(at::kFloat)));
  EXPECT_TRUE(bit_equal(matrix.to(this->device(), at::kBFloat16), matrix.to(at::kBFloat16)));
  const auto narrow = this->pinned_like(matrix).narrow(1, 3, 8);
  narrow.copy_(x.narrow(1, 3, 8), /*non_blocking=*/true);
  this->default_stream().synchronize();
  EXPECT_TRUE(bit_equal(narrow, matrix.narrow(1, 3, 8)));
}

// ---- memory

TYPED_TEST_P(DeviceContract, CountsLiveAndPeakBytes) {
  using c10::CachingAllocator::StatType;
  auto* allocator = c10::getDeviceAllocator(this->kType);
  constexpr auto kAll = static_cast<std::size_t>(StatType::AGGREGATE);
  const auto live = [&] { return allocator->getDeviceStats(0).allocated_bytes[kAll].current; };
  const auto peak = [&] { return allocator->getDeviceStats(0).allocated_bytes[kAll].peak; };
  constexpr int64_t kBytes = 1 << 20;
  const auto before = live();
  auto a = at::empty({kBytes}, this->on_device().dtype(at::kByte));
  EXPECT_GE(live(), before + kBytes);
  allocator->resetPeakStats(0);
  EXPECT_EQ(peak(), live());
  at::empty({kBytes}, this->on_device().dtype(at::kByte));
  EXPECT_GE(peak(), before + 2 * kBytes);
  a.reset();
  EXPECT_EQ(live(), before);
}

TYPED_TEST_P(DeviceContract, TellsFreeAndTotalMemory) {
  const auto [free, total] = c10::getDeviceAllocator(this->kType)->getMemoryInfo(0);
  EXPECT_GT(free, 0u);
  EXPECT_GE(total, free);
}

TYPED_TEST_P(DeviceContract, RunsOutOfMemoryWithAnErrorOfItsOwnAndGoesOn) {
  auto* allocator = c10::getDeviceAllocator(this->kType);
  const auto total = static_cast<int64_t>(allocator->getMemoryInfo(0).second);
  const auto failures = allocator->getDeviceStats(0).num_ooms;
  EXPECT_THROW(at::empty({total + 1}, this->on_device().dtype(at::kByte)), c10::OutOfMemoryError);
  EXPECT_EQ(allocator->getDeviceStats(0).num_ooms, failures + 1);
  EXPECT_TRUE(bit_equal(this->ramp().to(this->device()), this->ramp()));
}

TYPED_TEST_P(DeviceContract, MemoryRecordedOnAStreamSurvivesItsTensorUntilTheStreamIsPast) {
  auto x = this->ramp().to(this->device());
  const auto host = this->pinned_like(x);
  const auto side = this->side_stream();
  auto held = TypeParam::hold_copies();
  const auto done = this->copy_on(side, host, x);
  this->guard().recordDataPtrOnStream(x.storage().data_ptr(), side);
  x.reset();
  const auto other = at::zeros({this->kElements}, this->on_device().dtype(at::kInt));  // must not take x's memory
  held.resume();
  done.synchronize();
  EXPECT_TRUE(bit_equal(host, this->ramp()));
  EXPECT_TRUE(bit_equal(other, at::zeros({this->kElements}, at::kInt)));
}

TYPED_TEST_P(DeviceContract, APinnedTensorMayDieWhileItsCopyIsQueued) {
  const auto x = at::zeros({this->kElements}, this->on_device().dtype(at::kInt));
  auto held = TypeParam::hold_copies();
  c10::Event loaded(this->kType);
  {
    auto source = this->pinned_like(this->ramp());
    source.copy_(this->ramp());
    loaded = this->copy_on(this->side_stream(), x, source);
  }
  const auto other = this->pinned_like(this->ramp());  // must not take its memory
  other.fill_(7);
  held.resume();
  loaded.block(this->default_stream());
  EXPECT_TRUE(bit_equal(x, this->ramp()));
}

TYPED_TEST_P(DeviceContract, KnowsPinnedMemory) {
  const auto host = this->pinned_like(this->ramp());
  EXPECT_TRUE(host.is_pinned());
  EXPECT_TRUE(host.device().is_cpu());
  EXPECT_FALSE(at::empty({4}).is_pinned());
  EXPECT_TRUE(at::ones({4}).pin_memory().is_pinned());
  EXPECT_NE(at::getHostAllocator(this->kType), nullptr);
}

REGISTER_TYPED_TEST_SUITE_P(
    DeviceContract, ThreadsStartOnTheDefaultStreamAndHaveACurrentOneEach, PoolStreamsAreNotTheDefaultStream,
    AStreamIsBusyUntilItsWorkIsDone, OneStreamKeepsTheOrderOfItsWork, AKernelFollowsTheWorkOfItsStream,
    SynchronizingTheDeviceWaitsForEveryStream, AnEventThatWasNeverRecordedIsDoneAndHoldsNobodyUp,
    AnEventIsDoneWhenTheWorkBeforeItIs, AWaitMeansTheRecordingThatHadBeenMade, AWaitDoesNotReachForLaterRecordings,
    AStreamThatWaitsStartsNothingBefore, TimeBetweenEventsCoversTheWorkBetweenThem, AMovedEventIsTheSameEvent,
    CopiesWithPinnedMemoryDoNotHoldTheHostUp, CopiesToPageableMemoryAreCompleteOnReturn, CopiesConvertAndChangeLayout,
    CountsLiveAndPeakBytes, TellsFreeAndTotalMemory, RunsOutOfMemoryWithAnErrorOfItsOwnAndGoesOn,
    MemoryRecordedOnAStreamSurvivesItsTensorUntilTheStreamIsPast, APinnedTensorMayDieWhileItsCopyIsQueued,
    KnowsPinnedMemory);

}  // namespace neap::testing
