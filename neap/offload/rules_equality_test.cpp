// Rule 14: numbers never change, whatever the device, the mode, the link and the windows.
#include "neap/offload/test_support.h"

namespace neap::offload {
namespace {

using namespace testing;
using namespace neap::literals;
using neap::testing::Handing;
using neap::testing::HostileModel;
using neap::testing::RotaryDecoder;
using neap::testing::train;
using neap::testing::TrainingRecord;

struct Setting {
  std::string name;
  Options options;
};

std::vector<Setting> settings() {
  return {
      {"automatic", all_sizes()},
      {"layers", all_sizes({.prefetch = Layers{1}})},
      {"nothing stays", all_sizes({.prefetch = Layers{2}, .keep_last = 0, .max_in_flight = 0_B})},
      {"bytes", all_sizes({.device_budget = 40_KiB, .prefetch = 16_KiB, .max_in_flight = 8_KiB})},
      {"no prefetch", all_sizes({.prefetch = 0_B, .keep_last = 0})},
      {"sync", all_sizes({.mode = Mode::kSync, .keep_last = 0})},
      {"off", all_sizes({.mode = Mode::kOff})},
  };
}

struct Link {
  double d2h_gbps, h2d_gbps;
};

class Equality : public OffloadTest, public ::testing::WithParamInterface<std::tuple<const char*, Link>> {
 protected:
  c10::Device device() const { return c10::Device(std::get<0>(GetParam())); }
  void SetUp() override {
    OffloadTest::SetUp();
    const Link link = std::get<1>(GetParam());
    throttle_copies(link.d2h_gbps, link.h2d_gbps);
  }

  // Trains `make()` without and with offload.
  template <class Make>
  void expect_equal(Make make, int64_t steps) {
    const auto run = [&](const Options* options) {
      auto model = make();
      std::unique_ptr<Engine> engine;
      if (options != nullptr) {
        engine = std::make_unique<Engine>(*options);
        engine->attach(*model);
      }
      return train(
          *model, [&](int64_t step) { return model->loss(step); }, steps);
    };
    const TrainingRecord expected = run(nullptr);
    for (const Setting& setting : settings()) EXPECT_TRUE(bit_equal(run(&setting.options), expected)) << setting.name;
  }
};

TEST_P(Equality, Rule14_HostileModelInFloat32AndBfloat16) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    expect_equal([&] { return std::make_unique<HostileModel>(3, at::TensorOptions().device(device()).dtype(dtype)); },
                 4);
  }
}

TEST_P(Equality, Rule14_RotaryDecoderWithTablesPassedAlong) {
  for (const auto handing : {Handing::kPositional, Handing::kKeyword}) {
    expect_equal([&] { return std::make_unique<RotaryDecoder>(RotaryDecoder::Shape{.layers = 4}, device(), handing); },
                 4);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Equality,
                         ::testing::Values(std::make_tuple("cpu", Link{0, 0}),
                                           std::make_tuple("privateuseone:0", Link{0, 0}),
                                           std::make_tuple("privateuseone:0", Link{0.02, 0.02})));

}  // namespace
}  // namespace neap::offload
