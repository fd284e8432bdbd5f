// On a library made of a Group's own gathers: ordered, the two have the same bits.
#include "neap/comm/internal/library_collectives.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "neap/comm/world.h"
#include "testing/matchers.h"
#include "testing/ranks.h"

namespace neap::comm::internal {
namespace {

using testing::bit_equal;
using testing::run_ranks;

// Adds in the reverse order of the ranks: a library's order is its own.
class GatheringLibrary final : public DeviceGroup {
 public:
  explicit GatheringLibrary(Group& group) : group_(group) {}

  void all_gather(const at::Tensor& full, const at::Tensor& mine) override {
    group_.all_gather(full, mine, "library").wait();
  }
  void all_to_all(const at::Tensor& rows, const at::Tensor& full) override {
    rows.view({group_.size(), -1}).copy_(rows_of(full).select(1, group_.rank()));
  }
  void reduce_scatter_sum(const at::Tensor& mine, const at::Tensor& full) override {
    mine.copy_(sum(rows_of(full).select(1, group_.rank())));
  }
  void all_reduce_sum(const at::Tensor& tensor) override {
    tensor.view({-1}).copy_(sum(rows_of(tensor, 1).select(1, 0)));
  }
  void all_reduce_max(const at::Tensor& tensor) override {
    group_.all_reduce(tensor, {.op = ReduceOp::kMax}, "library").wait();
  }
  void broadcast(const at::Tensor& tensor, int root) override { group_.broadcast(tensor, root, "library").wait(); }
  void abort() noexcept override {}

 private:
  // [rank, slice, elements]
  at::Tensor rows_of(const at::Tensor& full, int64_t slices = -1) {
    const at::Tensor all = at::empty({group_.size(), full.numel()}, full.options());
    all_gather(all, full.view({-1}));
    return all.view({group_.size(), slices == -1 ? group_.size() : slices, -1});
  }
  at::Tensor sum(const at::Tensor& rows) {
    at::Tensor total = rows.select(0, rows.size(0) - 1).clone();
    for (int64_t rank = rows.size(0) - 2; rank >= 0; --rank) total.add_(rows.select(0, rank));
    return total;
  }

  Group& group_;
};

at::Tensor values(int64_t elements, int rank, at::ScalarType dtype) {
  return at::randn({elements}, at::detail::createCPUGenerator(static_cast<uint64_t>(rank + 1))).mul_(100).to(dtype);
}

struct Kinds {
  at::ScalarType rows, result;
};

const Reduction kReductions[] = {
    {}, {.op = ReduceOp::kAverage}, {.op = ReduceOp::kAverage, .factor = 0.3}, {.op = ReduceOp::kMax}};

TEST(LibraryCollectives, OrderedTheyHaveTheBitsOfTheGroup) {
  run_ranks(3, [](World& world) {
    Group& group = world.all();
    GatheringLibrary library(group);
    for (const auto& [rows, result] : {Kinds{at::kFloat, at::kFloat}, Kinds{at::kBFloat16, at::kFloat},
                                       Kinds{at::kBFloat16, at::kBFloat16}, Kinds{at::kDouble, at::kDouble}}) {
      for (const Reduction& reduction : kReductions) {
        const at::Tensor full = values(3 * 1000, group.rank(), rows);
        const at::Tensor expected = at::zeros({1000}, result), found = at::zeros({1000}, result);
        group.reduce_scatter(expected, full, reduction, "group").wait();
        reduce_scatter_on(library, found, full, {rows, result, reduction, 3}, /*ordered=*/true);
        EXPECT_TRUE(bit_equal(found, expected));

        const at::Tensor alike = full.clone();
        group.all_reduce(full, reduction, "group").wait();
        all_reduce_on(library, alike, {rows, rows, reduction, 3}, /*ordered=*/true);
        EXPECT_TRUE(bit_equal(alike, full));
      }
    }
  });
}

TEST(LibraryCollectives, UnorderedTheyAgreeWithinRounding) {
  run_ranks(3, [](World& world) {
    Group& group = world.all();
    GatheringLibrary library(group);
    for (const Reduction& reduction : kReductions) {
      const at::Tensor full = values(3 * 1000, group.rank(), at::kFloat);
      const at::Tensor expected = at::zeros({1000}), found = at::zeros({1000});
      group.reduce_scatter(expected, full, reduction, "group").wait();
      reduce_scatter_on(library, found, full, {at::kFloat, at::kFloat, reduction, 3}, /*ordered=*/false);
      EXPECT_LT((found - expected).abs().max().item<float>(), 1e-3F);
      const at::Tensor alike = full.clone();
      group.all_reduce(full, reduction, "group").wait();
      all_reduce_on(library, alike, {at::kFloat, at::kFloat, reduction, 3}, /*ordered=*/false);
      EXPECT_LT((alike - full).abs().max().item<float>(), 1e-3F);
    }
  });
}

}  // namespace
}  // namespace neap::comm::internal
