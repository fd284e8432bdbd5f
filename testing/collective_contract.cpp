#include "testing/collective_contract.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <string>
#include <vector>

#include "neap/base/error.h"
#include "testing/matchers.h"

namespace neap::testing {
namespace {

using comm::Group;
using comm::ReduceOp;
using comm::Reduction;

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong};
// Elements per rank: none, one, few, more than an all_reduce sends in one round; and in float32 on the CPU, for it
// takes a while, more than a reduction has on the wire at a time.
constexpr int64_t kSizes[] = {0, 1, 5, 9'001, 300'001};
constexpr int64_t kLarge = 100'000;

// What rank `rank` contributes: any member can make any other's, so each knows the right answer by itself.
at::Tensor row(int rank, int64_t elements, at::ScalarType type) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + rank));
  const auto values = at::randn({elements}, generator, at::kFloat);
  return c10::isIntegralType(type, false) ? (values * 1e6).to(type) : values.to(type);
}

// One process that adds the rows in rank order.
at::Tensor reduced(int ranks, int64_t elements, at::ScalarType type, const Reduction& how, at::ScalarType result) {
  const bool integer = c10::isIntegralType(type, false);
  const auto wide = integer ? at::kLong : type == at::kDouble || result == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum = row(0, elements, type).to(wide);
  for (int r = 1; r < ranks; ++r) {
    const at::Tensor next = row(r, elements, type).to(wide);
    sum = how.op == ReduceOp::kMax ? at::maximum(sum, next) : sum + next;
  }
  if (how.op == ReduceOp::kAverage) sum = sum / ranks;
  if (how.factor != 1) sum = sum * how.factor;
  return sum.to(result);
}

class Contract {
 public:
  Contract(Group& group, c10::Device device) : group_(group), device_(device) {}

  void check() {
    for (const auto type : kTypes) {
      for (const int64_t size : kSizes) {
        if (size > kLarge && (type != at::kFloat || !device_.is_cpu())) continue;
        case_ = internal::concat(c10::toString(type), ", ", size, " elements a rank, ", group_.size(), " ranks");
        const std::vector<int64_t> even(static_cast<size_t>(group_.size()), size);
        std::vector<int64_t> uneven = even;  // one rank may hold all of it, another nothing
        for (int r = 0; r < group_.size(); ++r) uneven[static_cast<size_t>(r)] = size * ((r * 2 + 1) % 4) / 2;
        for (const auto& pieces : {even, uneven}) {
          gather(type, pieces, pieces == even);
          scatter(type, pieces, pieces == even);
        }
        reduce_all(type, size);
        broadcast(type, size);
      }
    }
    group_.barrier("contract").synchronize();
  }

 private:
  static int64_t sum(const std::vector<int64_t>& pieces, int count) {
    int64_t total = 0;
    for (int r = 0; r < count; ++r) total += pieces[static_cast<size_t>(r)];
    return total;
  }
  int64_t piece(const std::vector<int64_t>& pieces) const { return pieces[static_cast<size_t>(group_.rank())]; }

  void expect(const at::Tensor& found, const at::Tensor& expected, const char* what) const {
    if (const auto equal = bit_equal(found.cpu(), expected); !equal)
      throw Error(internal::concat(what, ", ", case_, ": ", equal.message()));
  }
  static void expect_untouched(const at::Tensor& tensor, int64_t version, const char* what) {
    if (tensor._version() != version) throw Error(internal::concat(what, " bumped a version counter"));
  }

  void gather(at::ScalarType type, const std::vector<int64_t>& pieces, bool even) {
    const int64_t total = sum(pieces, group_.size()), begin = sum(pieces, group_.rank());
    std::vector<at::Tensor> rows;
    for (int r = 0; r < group_.size(); ++r) rows.push_back(row(r, pieces[static_cast<size_t>(r)], type));
    const at::Tensor expected = at::cat(rows);
    const at::Tensor mine = rows[static_cast<size_t>(group_.rank())].to(device_);
    const auto cut = even ? comm::Pieces() : comm::Pieces(pieces);

    const at::Tensor full = at::full({total}, 7, mine.options());
    int64_t version = full._version();
    group_.all_gather(full, mine, "gather", cut).wait();
    expect_untouched(full, version, "all_gather");
    expect(full, expected, "all_gather");

    const at::Tensor in_place = at::full({total}, 7, mine.options()).requires_grad_(at::isFloatingType(type));
    in_place.detach().narrow(0, begin, piece(pieces)).copy_(mine);
    version = in_place._version();
    group_.all_gather(in_place, "gather in place", cut).wait();
    expect_untouched(in_place, version, "all_gather in place");
    expect(in_place.detach(), expected, "all_gather in place");
  }

  void scatter(at::ScalarType type, const std::vector<int64_t>& pieces, bool even) {
    const int64_t total = sum(pieces, group_.size()), begin = sum(pieces, group_.rank());
    const at::Tensor given = row(group_.rank(), total, type);
    const at::Tensor full = given.to(device_, type, /*non_blocking=*/false, /*copy=*/true);
    const auto cut = even ? comm::Pieces() : comm::Pieces(pieces);
    const bool integer = c10::isIntegralType(type, false);
    std::vector<Reduction> reductions{{}, {.op = ReduceOp::kMax}};
    if (!integer) {
      reductions.push_back({.op = ReduceOp::kAverage});
      reductions.push_back({.op = ReduceOp::kAverage, .factor = 0.3});
    }
    for (const auto& how : reductions) {
      for (const auto result : {type, integer ? type : at::kFloat}) {
        const at::Tensor mine = at::full({piece(pieces)}, 7, full.options().dtype(result));
        group_.reduce_scatter(mine, full, how, "scatter", cut).wait();
        expect(mine, reduced(group_.size(), total, type, how, result).narrow(0, begin, piece(pieces)),
               "reduce_scatter");
        expect(full, given, "reduce_scatter's input");
      }
    }
    // In place: the result replaces this rank's slice, and nothing else.
    at::Tensor expected = given.clone();
    expected.narrow(0, begin, piece(pieces))
        .copy_(reduced(group_.size(), total, type, {}, type).narrow(0, begin, piece(pieces)));
    group_.reduce_scatter(full.narrow(0, begin, piece(pieces)), full, {}, "scatter in place", cut).wait();
    expect(full, expected, "reduce_scatter in place");
  }

  void reduce_all(at::ScalarType type, int64_t size) {
    std::vector<Reduction> reductions{{}, {.op = ReduceOp::kMax}};
    if (!c10::isIntegralType(type, false)) reductions.push_back({.op = ReduceOp::kAverage, .factor = 0.3});
    for (const auto& how : reductions) {
      const at::Tensor tensor = row(group_.rank(), size, type).to(device_);
      const int64_t version = tensor._version();
      group_.all_reduce(tensor, how, "reduce").wait();
      expect_untouched(tensor, version, "all_reduce");
      expect(tensor, reduced(group_.size(), size, type, how, type), "all_reduce");
    }
  }

  void broadcast(at::ScalarType type, int64_t size) {
    for (int root = 0; root < group_.size(); ++root) {
      const at::Tensor tensor = row(group_.rank(), size, type).to(device_);
      group_.broadcast(tensor, root, "broadcast").wait();
      expect(tensor, row(root, size, type), "broadcast");
    }
  }

  Group& group_;
  const c10::Device device_;
  std::string case_;
};

}  // namespace

void check_collectives(comm::Group& group, c10::Device device) { Contract(group, device).check(); }

}  // namespace neap::testing
