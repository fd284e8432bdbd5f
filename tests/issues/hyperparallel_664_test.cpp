// HyperParallel issue 664: rotary tables computed once and passed to every layer; swapping a layer freed the storage
// that the caller and the other layers still used.
#include <tuple>

#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

struct Selection {
  const char* name;
  std::vector<std::string> patterns;
};

class HyperParallel664 : public IssueTest,
                         public ::testing::WithParamInterface<std::tuple<Handing, Selection, bool>> {};

TEST_P(HyperParallel664, TablesHandedToEveryLayerStayIntact) {
  const auto& [handing, selection, throttled] = GetParam();
  if (throttled) throttle_copies(0.05, 0.05);
  const auto make = [handing = handing] {
    return std::make_shared<RotaryDecoder>(RotaryDecoder::Shape{}, sim(), handing);
  };
  const auto plain = train_on_sim<RotaryDecoder>(make, 10, {});

  auto options = everything_leaves();
  options.prefetch = offload::Layers{1};
  const auto model = make();
  offload::Engine engine(options);
  engine.attach(*model, selection.patterns);
  int64_t offloaded = 0;
  const auto swapped = train(
      *model, [&](int64_t step) { return model->loss(step); }, 10,
      [&](int64_t) {
        const auto expected = model->fresh_tables();
        EXPECT_TRUE(bit_equal(model->tables().cos, expected.cos));
        EXPECT_TRUE(bit_equal(model->tables().sin, expected.sin));
        offloaded += engine.take_step_report().offloaded_bytes.count;
      });
  EXPECT_TRUE(bit_equal(plain, swapped));
  EXPECT_GT(offloaded, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Layers, HyperParallel664,
    ::testing::Combine(::testing::Values(Handing::kPositional, Handing::kKeyword),
                       ::testing::Values(Selection{"ZeroToTen", {"0-10"}}, Selection{"All", {"layers.{*}"}},
                                         Selection{"Alternating", {"0", "2", "4", "6", "8", "10"}}),
                       ::testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<1>(info.param).name) +
             (std::get<0>(info.param) == Handing::kKeyword ? "ByKeyword" : "ByPosition") +
             (std::get<2>(info.param) ? "OnASlowLink" : "");
    });

}  // namespace
}  // namespace neap::testing
