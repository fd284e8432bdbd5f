// Saved tensors changed in place after they were saved: PyTorch skips its check when hooks are on (documented for
// axolotl's and PEFT's in-place additions), so gradients are silently wrong there.
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

class VersionCheck : public IssueTest {
 protected:
  static std::string backward_error(const std::function<at::Tensor()>& loss) {
    const auto value = loss();
    try {
      value.backward();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
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
