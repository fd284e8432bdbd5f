// Layouts that were lost or crashed: TRL 5694 (non-contiguous saved tensors), torchtune 2456 (tensors of other devices
// and kinds must come back untouched).
#include <torch/csrc/autograd/custom_function.h>

#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Saves whatever it is told to and hands it to a probe in backward.
struct SaveTensors : public torch::autograd::Function<SaveTensors> {
  using Probe = std::function<void(const variable_list&)>;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const variable_list& saved, Probe* probe) {
    context->save_for_backward(saved);
    context->saved_data["probe"] = reinterpret_cast<int64_t>(probe);
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    (*reinterpret_cast<Probe*>(context->saved_data["probe"].toInt()))(context->get_saved_variables());
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

class SavedLayouts : public IssueTest {
 protected:
  // What comes back of `make(x)`'s tensors after a round trip, with the report.
  static offload::StepReport round_trip(const std::function<variable_list(const at::Tensor&)>& make,
                                        const SaveTensors::Probe& check) {
    const auto x = weight({4, 6, 8, 8});
    SaveTensors::Probe probe = check;
    FunctionUnits model({[&](const at::Tensor& in) { return SaveTensors::apply(in, make(in), &probe); }}, {x});
    offload::Engine engine(everything_leaves());
    engine.attach(model, {"layers.0"});
    model.forward(x).sum().backward();
    return engine.take_step_report();
  }
};

TEST_F(SavedLayouts, ValuesAndStridesComeBack) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> layouts = {
      [](const at::Tensor& t) { return t.transpose(1, 2); },
      [](const at::Tensor& t) { return t.slice(1, 0, c10::nullopt, 2); },
      [](const at::Tensor& t) { return t.slice(3, 1, 5); },
      [](const at::Tensor& t) {
        return t.mean({1}, true).expand({4, 6, 8, 8});
      },
      [](const at::Tensor& t) {
        return t.select(0, 2).select(0, 1).t().as_strided({3, 2}, {2, 1}, 70);
      },
      [](const at::Tensor& t) { return t.contiguous(at::MemoryFormat::ChannelsLast); },
      [](const at::Tensor& t) { return t.narrow(0, 0, 0); },
      [](const at::Tensor& t) { return t.sum(); },
      [](const at::Tensor& t) { return t.to(at::kBFloat16).transpose(0, 3); },
      [](const at::Tensor& t) { return at::complex(t, t).conj(); },
      [](const at::Tensor& t) { return t.to(at::kLong).flip(1); },
      [](const at::Tensor& t) { return t > 0; },
  };
  for (size_t i = 0; i < layouts.size(); ++i) {
    at::Tensor expected;
    const auto make = [&](const at::Tensor& x) -> variable_list {
      const at::NoGradGuard no_grad;
      const auto saved = layouts[i](x.detach().clone().select(0, 0).unsqueeze(0).expand({4, 6, 8, 8}).contiguous());
      expected = saved.cpu();
      return {saved};
    };
    std::vector<int64_t> sizes, strides;
    bool conjugate = false;
    const auto capture = [&](const at::Tensor& x) -> variable_list {
      auto all = make(x);
      sizes = all[0].sizes().vec(), strides = all[0].strides().vec(), conjugate = all[0].is_conj();
      return all;
    };
    round_trip(capture, [&](const variable_list& saved) {
      ASSERT_EQ(saved.size(), 1) << i;
      EXPECT_EQ(saved[0].device(), sim()) << i;
      EXPECT_EQ(saved[0].sizes().vec(), sizes) << i;
      EXPECT_EQ(saved[0].strides().vec(), strides) << i;
      EXPECT_EQ(saved[0].is_conj(), conjugate) << i;
      EXPECT_TRUE(bit_equal(saved[0].cpu().resolve_conj(), expected.resolve_conj())) << i;
    });
  }
}

TEST_F(SavedLayouts, TensorsOfOtherDevicesAndKindsPassUntouched) {
  const auto on_cpu = at::arange(12, at::kFloat), state = at::arange(5056, at::kLong).to(at::kByte);
  const auto sparse = at::eye(4).to_sparse();
  bool probed = false;
  const auto report = round_trip(
      [&](const at::Tensor&) -> variable_list {
        return {on_cpu, state, sparse, {}};
      },
      [&](const variable_list& saved) {
        probed = true;
        EXPECT_EQ(saved[0].device(), c10::Device(c10::kCPU));
        EXPECT_EQ(saved[0].data_ptr(), on_cpu.data_ptr());
        EXPECT_EQ(saved[1].data_ptr(), state.data_ptr());
        EXPECT_TRUE(saved[2].is_sparse());
        EXPECT_FALSE(saved[3].defined());
      });
  EXPECT_TRUE(probed);
  EXPECT_EQ(report.offloaded_storages, 0);
  EXPECT_EQ(report.kept_tensors, 3);
}

}  // namespace
}  // namespace neap::testing
