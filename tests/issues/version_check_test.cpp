// Saved tensors changed in place after they were saved: PyTorch skips its check when hooks are on (documented for
// axolotl's and PEFT's in-place additions), so gradients are silently wrong there.
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

class VersionCheck : public IssueTest {
 protected:
  static std::string backward_error(const std::function<at::Tensor()>& loss) {
    const auto value = loss();
    return error_of<c10::Error>([&] { value.backward(); });
  }
};

TEST_F(VersionCheck, AnActivationChangedAfterItWasSavedIsAnError) {
  const auto w = weight({16, 16}), x = weight({8, 16});
  FunctionUnits model({[&](const at::Tensor& in) {
    auto y = at::linear(in, w);
    const auto z = y * y;
    y.add_(1);
    return z;
  }});
  const auto loss = [&] { return model.forward(x).sum(); };
  const auto eager = backward_error(loss);
  ASSERT_THAT(eager, HasSubstr("modified by an inplace operation"));
  offload::Engine engine(everything_leaves());
  engine.attach(model, {"layers.0"});
  const auto with = backward_error(loss);
  EXPECT_THAT(with, HasSubstr("modified by an inplace operation"));
  EXPECT_THAT(with, HasSubstr("[8, 16]"));
  EXPECT_THAT(with, HasSubstr("is at version 1; expected version 0"));
  w.mutable_grad().reset(), x.mutable_grad().reset();
}

// The change and our copy of what was there before race, which the checker reports. What was copied is never used.
TEST_F(VersionCheck, AChangeWhileTheCopyIsUnderWayIsTheSameErrorAndLeavesNothingBehind) {
  const auto w = weight({16, 16}), x = weight({8, 16});
  bool change = true;
  FunctionUnits model({[&](const at::Tensor& in) {
    auto y = at::linear(in, w).tanh();
    const auto z = y * y;
    if (change) y.add_(1);
    return z;
  }});
  const auto loss = [&] { return model.forward(x).sum(); };
  change = false;
  const auto plain = differentiate(loss, {w, x});
  auto options = everything_leaves();
  options.max_in_flight = Bytes(int64_t{1} << 30);  // nobody waits for the copy
  offload::Engine engine(options);
  engine.attach(model, {"layers.0"});
  const int64_t before = live_bytes();
  for (int step = 0; step < 3; ++step) {
    change = true;
    std::string error;
    {
      auto held = hold_copies(sim::Link::kDeviceToHost);
      const auto value = loss();  // the write comes for certain before the copy has read
      held.resume();
      error = error_of<c10::Error>([&] { value.backward(); });
    }
    EXPECT_THAT(error, HasSubstr("modified by an inplace operation"));
    EXPECT_THAT(error, HasSubstr("is at version 1; expected version 0"));
    synchronize();
    EXPECT_THAT(take_hazards(), ::testing::Not(::testing::IsEmpty()));
    w.mutable_grad().reset(), x.mutable_grad().reset();
    EXPECT_EQ(live_bytes(), before);
    change = false;
    EXPECT_TRUE(bit_equal(differentiate(loss, {w, x}), plain)) << step;
  }
}

TEST_F(VersionCheck, AParameterWrittenBetweenForwardAndBackwardIsAnError) {
  const auto w = weight({16, 16}), x = weight({8, 16});
  FunctionUnits model({[&](const at::Tensor& in) { return at::matmul(in, w.t()); }});
  offload::Engine engine(everything_leaves());
  engine.attach(model, {"layers.0"});
  const auto error = backward_error([&] {
    const auto value = model.forward(x).sum();
    const at::NoGradGuard no_grad;
    at::Tensor(w).add_(1);
    return value;
  });
  EXPECT_THAT(error, HasSubstr("modified by an inplace operation"));
  w.mutable_grad().reset(), x.mutable_grad().reset();
}

TEST_F(VersionCheck, AChangeBeforeTheSaveIsRight) {
  const auto w = weight({16, 16}), x = weight({8, 16});
  FunctionUnits model({[&](const at::Tensor& in) {
    auto y = at::linear(in, w);
    y.add_(1);
    return y.relu_() * 2;
  }});
  const auto loss = [&] { return model.forward(x).pow(2).sum(); };
  const auto plain = differentiate(loss, {w, x});
  offload::Engine engine(everything_leaves());
  engine.attach(model, {"layers.0"});
  EXPECT_TRUE(bit_equal(differentiate(loss, {w, x}), plain));
}

}  // namespace
}  // namespace neap::testing
