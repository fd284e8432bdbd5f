// Steps of known sizes on the simulated accelerator, whose allocator counts in blocks of 512 bytes.
#include "neap/train/peak_meter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "testing/sim_fixture.h"

namespace neap::train {
namespace {

using namespace literals;
using testing::on_sim;

constexpr int64_t kWide = 4096;  // floats: 16 KiB

class PeakMeterTest : public testing::SimTest {
 protected:
  // Four weights of 16 KiB; the state of their optimizer would be on the device, too.
  void SetUp() override {
    SimTest::SetUp();
    for (int i = 0; i < 4; ++i) weights_.push_back(at::ones({kWide}, on_sim()).set_requires_grad(true));
    state_ = at::empty({128 << 10}, on_sim().dtype(at::kByte));
    meter_.emplace(weights_, device_);
  }
  void TearDown() override {
    meter_.reset();
    weights_.clear();
    state_.reset();
    SimTest::TearDown();
  }

  void begin() {
    for (at::Tensor& weight : weights_) weight.mutable_grad().reset();
    device_.reset_peak();
    meter_->begin_step(128_KiB);
  }
  // Saves 16 KiB a weight for backward.
  at::Tensor loss() {
    at::Tensor x = at::ones({kWide}, on_sim());
    for (const at::Tensor& weight : weights_) x = x * weight;
    return x.sum();
  }

  device::Device& device_ = device::Device::of(testing::sim());
  std::vector<at::Tensor> weights_;
  at::Tensor state_;
  std::optional<PeakMeter> meter_;
};

TEST_F(PeakMeterTest, PartsAddUpToThePeak) {
  begin();
  {
    const at::Tensor value = loss();
    meter_->look("forward");
    value.backward();
  }
  meter_->look("backward");
  const auto parts = meter_->parts();
  ASSERT_TRUE(parts);
  EXPECT_EQ(parts->total(), device_.memory_stats()->allocated_peak);
  EXPECT_EQ(parts->parameters, 64_KiB);
  EXPECT_EQ(parts->optimizer, 128_KiB);
  EXPECT_EQ(parts->piece, "backward");
}

TEST_F(PeakMeterTest, APeakOfForwardHasNoGradientsAndItsActivations) {
  begin();
  const at::Tensor value = loss();
  { const at::Tensor large = at::empty({1 << 20}, on_sim().dtype(at::kByte)); }
  meter_->look("forward");
  const auto parts = meter_->parts();
  ASSERT_TRUE(parts);
  EXPECT_EQ(parts->piece, "forward");
  EXPECT_EQ(parts->gradients, 0_B);
  // Each product saves what comes in; the last output lives for as long as the sum takes.
  EXPECT_GE(parts->activations, 64_KiB);
  EXPECT_LT(parts->activations, 66_KiB);
  EXPECT_GE(parts->workspace, 1_MiB);
  EXPECT_LT(parts->workspace, 1_MiB + 4_KiB);
}

TEST_F(PeakMeterTest, APeakAfterBackwardHoldsEveryGradientAndNoActivation) {
  begin();
  loss().backward();
  meter_->look("backward");
  { const at::Tensor large = at::empty({1 << 20}, on_sim().dtype(at::kByte)); }
  meter_->look("update");
  const auto parts = meter_->parts();
  ASSERT_TRUE(parts);
  EXPECT_EQ(parts->piece, "update");
  EXPECT_EQ(parts->gradients, 64_KiB);
  EXPECT_EQ(parts->activations, 0_B);
  EXPECT_EQ(parts->workspace, 1_MiB);
}

TEST_F(PeakMeterTest, GradientsCountOnceHoweverManyBackwardsAddToThem) {
  begin();
  for (int micro = 0; micro < 3; ++micro) loss().backward();
  { const at::Tensor large = at::empty({1 << 20}, on_sim().dtype(at::kByte)); }
  meter_->look("update");
  EXPECT_EQ(meter_->parts()->gradients, 64_KiB);
  begin();
  meter_->look("forward");
  EXPECT_EQ(meter_->parts()->gradients, 0_B) << "a new step has none";
}

TEST_F(PeakMeterTest, AMeterThatIsGoneLeavesNoHook) {
  begin();
  meter_.reset();
  loss().backward();
  EXPECT_TRUE(weights_[0].grad().defined());
}

TEST_F(PeakMeterTest, SaysNothingWhereNobodyCounts) {
  PeakMeter meter({at::ones({4}).set_requires_grad(true)}, device::Device::of(c10::kCPU));
  meter.begin_step(1_KiB);
  meter.look("forward");
  EXPECT_FALSE(meter.parts());
}

}  // namespace
}  // namespace neap::train
