// What the fallback does with tensors beyond reading inputs and making outputs: views, in-place operators, lists,
// growing outputs, storages set and resized, mixed devices.
#include <ATen/Context.h>
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gru_cell.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/tril_indices.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <sstream>
#include <vector>

#include "testing/error_of.h"
#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

using at::Tensor;

class SimTensors : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    cx_ = at::randn({6, 8});
    cy_ = at::randn({6, 8});
    x_ = cx_.to(sim());
    y_ = cy_.to(sim());
  }
  void TearDown() override {
    x_.reset();
    y_.reset();
    SimTest::TearDown();
  }

  Tensor cx_, cy_, x_, y_;
};

TEST_F(SimTensors, ViewsShareTheStorageAndRunNoKernel) {
  const auto kernels = control().counters(0).kernels;
  const auto live = live_bytes();
  const std::vector<Tensor> views{x_.t(),
                                  x_.slice(0, 1, 5, 2),
                                  x_.view({8, 6}),
                                  x_.unfold(1, 3, 2),
                                  x_.view(at::kInt),
                                  x_.expand({2, 6, 8}),
                                  x_.diagonal(),
                                  at::view_as_complex(x_.view({6, 4, 2})),
                                  x_.select(1, 3),
                                  x_.squeeze(),
                                  x_.detach()};
  for (const auto& view : views) EXPECT_TRUE(view.storage().is_alias_of(x_.storage())) << view.sizes();
  EXPECT_EQ(control().counters(0).kernels, kernels);
  EXPECT_EQ(live_bytes(), live);
  EXPECT_TRUE(bit_equal(views[3], cx_.unfold(1, 3, 2)));
}

TEST_F(SimTensors, InPlaceOperatorsWriteThroughViews) {
  const auto run = [](Tensor x, const Tensor& y) {
    x = x.clone();
    x.add_(y).mul_(0.5);
    x.select(0, 1).zero_();
    x.t_();
    x.masked_fill_(x > 0, 3.0);
    x.narrow(0, 2, 3).copy_(x.narrow(0, 4, 3).clone());
    x.t().view({-1}).slice(0, 0, 48, 5).fill_(9);
    return x;
  };
  EXPECT_TRUE(bit_equal(run(x_, y_), run(cx_, cy_)));
}

TEST_F(SimTensors, InPlaceOperatorsKeepTheMemoryAndBumpTheVersion) {
  const auto* data = x_.const_data_ptr();
  const auto version = x_._version();
  x_.add_(1);
  EXPECT_EQ(x_.const_data_ptr(), data);
  EXPECT_EQ(x_._version(), version + 1);
}

TEST_F(SimTensors, OutputsGrowOnTheDevice) {
  auto empty = at::empty({0}, on_sim());
  at::add_out(empty, x_, y_);
  EXPECT_TRUE(bit_equal(empty, cx_ + cy_));
  EXPECT_EQ(empty.storage().device(), sim());

  auto ready = at::empty({6, 8}, on_sim());
  const auto* data = ready.const_data_ptr();
  at::mul_out(ready, x_, y_);
  EXPECT_TRUE(bit_equal(ready, cx_ * cy_));
  EXPECT_EQ(ready.const_data_ptr(), data);

  const auto before = live_bytes();
  auto indices = at::empty({0}, on_sim().dtype(at::kLong));
  at::nonzero_out(indices, x_ > 0);  // the CPU's kernel resizes it
  EXPECT_TRUE(bit_equal(indices, at::nonzero(cx_ > 0)));
  EXPECT_EQ(live_bytes(), before + static_cast<int64_t>(indices.nbytes()));

  auto values = at::empty({0}, on_sim()), positions = at::empty({0}, on_sim().dtype(at::kLong));
  at::max_out(values, positions, x_, 1);
  EXPECT_TRUE(bit_equal(positions, std::get<1>(cx_.max(1))));
}

TEST_F(SimTensors, ListsGoThroughTheKernelsTogether) {
  std::vector<Tensor> list{x_.clone(), y_.clone()}, cpu_list{cx_.clone(), cy_.clone()};
  for (auto* l : {&list, &cpu_list}) {
    at::_foreach_add_(*l, 1.5);
    at::_foreach_mul_(*l, *l);
    at::_foreach_addcdiv_(*l, *l, *l, 0.5);
  }
  EXPECT_TRUE(bit_equal(list, cpu_list));
  EXPECT_TRUE(bit_equal(at::_foreach_norm(list), at::_foreach_norm(cpu_list)));
}

TEST_F(SimTensors, TheFusedOptimizerUpdatesManyParametersInOneKernel) {
  const auto run = [](c10::Device device) {
    at::manual_seed(3);
    std::vector<Tensor> parameters, grads, averages, squares, maxima, steps;
    for (int i = 0; i < 40; ++i) {
      parameters.push_back(at::randn({5, 3}).to(device));
      grads.push_back(at::randn({5, 3}).to(device));
      averages.push_back(at::zeros({5, 3}).to(device));
      squares.push_back(at::zeros({5, 3}).to(device));
      steps.push_back(at::full({}, 1.0f).to(device));
    }
    at::_fused_adamw_(parameters, grads, averages, squares, maxima, steps, 1e-3, 0.9, 0.99, 0.1, 1e-8, false, false);
    parameters.insert(parameters.end(), squares.begin(), squares.end());
    return parameters;
  };
  EXPECT_TRUE(bit_equal(run(sim()), run(at::kCPU)));
}

TEST_F(SimTensors, StoragesAreSetAndResized) {
  auto grown = at::arange(6, on_sim());
  grown.resize_({3, 4});
  EXPECT_EQ(grown.storage().nbytes(), 12 * sizeof(int64_t));
  EXPECT_TRUE(bit_equal(grown.view({-1}).narrow(0, 0, 6), at::arange(6)));

  auto set = at::empty({0}, on_sim());
  set.set_(x_);
  EXPECT_TRUE(set.storage().is_alias_of(x_.storage()));
  EXPECT_TRUE(bit_equal(set, cx_));
  set.set_(x_.storage(), 8, {2, 8}, {8, 1});
  EXPECT_TRUE(bit_equal(set, cx_.narrow(0, 1, 2)));
  set.set_();
  EXPECT_EQ(set.numel(), 0);
}

TEST_F(SimTensors, FactoriesMakeThemOnTheDevice) {
  EXPECT_TRUE(bit_equal(at::arange(5, on_sim()), at::arange(5)));
  EXPECT_TRUE(bit_equal(at::full({2, 2}, 7, on_sim()), at::full({2, 2}, 7)));
  EXPECT_TRUE(bit_equal(at::eye(3, on_sim()), at::eye(3)));
  EXPECT_TRUE(bit_equal(at::linspace(0, 1, 5, on_sim()), at::linspace(0, 1, 5)));
  EXPECT_TRUE(bit_equal(at::tril_indices(3, 3, 0, on_sim().dtype(at::kLong)), at::tril_indices(3, 3, 0, at::kLong)));
  EXPECT_EQ(x_.new_zeros({3}).device(), sim());
  EXPECT_EQ(at::zeros_like(x_).device(), sim());
  EXPECT_EQ(at::_efficientzerotensor({3}, on_sim()).sum().item<float>(), 0);
  EXPECT_EQ(at::empty({0, 4}, on_sim(1)).device(), sim(1));
}

TEST_F(SimTensors, OfDifferentDevicesDoNotMix) {
  EXPECT_NE(error_of<c10::Error>([&] { x_ + cy_; }).find("same device"), std::string::npos);
  EXPECT_NE(error_of<c10::Error>([&] { x_ + y_.to(sim(1)); }).find("sim:0 and sim:1"), std::string::npos);
  EXPECT_TRUE(bit_equal(x_ + at::scalar_tensor(2.0f), cx_ + 2.0f));                         // 0-dim CPU tensors may
  EXPECT_TRUE(bit_equal(x_.index({at::tensor({4, 0})}), cx_.index({at::tensor({4, 0})})));  // and indices
  EXPECT_NE(error_of<c10::Error>([&] { at::empty({1}, on_sim(5)); }).find("no sim:5"), std::string::npos);
  EXPECT_NE(error_of<c10::Error>([&] { at::empty({1}, on_sim().pinned_memory(true)); }).find("pinned"),
            std::string::npos);
  EXPECT_NE(error_of<c10::Error>([&] { x_.to_sparse(); }), kNoError);
}

TEST_F(SimTensors, LazyConjugateAndNegativeBitsSurviveCopies) {
  const auto z = at::view_as_complex(x_.view({6, 4, 2})), cz = at::view_as_complex(cx_.view({6, 4, 2}));
  EXPECT_TRUE(z.conj().is_conj());
  EXPECT_TRUE(bit_equal(z.conj().cpu().resolve_conj(), cz.conj().resolve_conj()));
  EXPECT_TRUE(bit_equal(z.conj() * z, cz.conj() * cz));
  EXPECT_TRUE(bit_equal(at::imag(z.conj()).clone(), at::imag(cz.conj()).clone()));
  EXPECT_TRUE(bit_equal(cz.conj().to(sim()), cz.conj().resolve_conj()));
}

TEST_F(SimTensors, GoFromDeviceToDevice) {
  const auto there = x_.to(sim(1));
  EXPECT_EQ(there.device(), sim(1));
  EXPECT_TRUE(bit_equal(there, cx_));
  EXPECT_TRUE(bit_equal(y_.t().to(sim(1), at::kHalf), cy_.t().to(at::kHalf)));
  EXPECT_EQ(control().counters(0).peer.copies, 2);
}

TEST_F(SimTensors, MeetAClearErrorWhereTheCpuHasNoKernel) {
  const auto weights = at::ones({24, 8}, on_sim());  // ATen sends a device's cells to fused kernels
  EXPECT_NE(
      error_of<c10::Error>([&] { at::gru_cell(x_, y_, weights, weights); }).find("the CPU has none for this operator"),
      std::string::npos);
}

TEST_F(SimTensors, ArePrinted) {
  std::ostringstream out, expected;
  out << x_.narrow(0, 0, 2).narrow(1, 0, 2);
  expected << cx_.narrow(0, 0, 2).narrow(1, 0, 2);
  EXPECT_EQ(out.str().substr(0, 20), expected.str().substr(0, 20));
  EXPECT_NE(out.str().find("Float"), std::string::npos) << out.str();
}

}  // namespace
}  // namespace neap::testing
