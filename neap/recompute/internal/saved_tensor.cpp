#include "neap/recompute/internal/saved_tensor.h"

#include <ATen/ops/zeros.h>

#include <cstring>
#include <string_view>

#include "neap/autograd/detached_alias.h"
#include "neap/autograd/op_name.h"
#include "neap/base/error.h"

namespace neap::recompute::internal {
namespace {

using neap::internal::concat;

constexpr std::string_view kOtherPath =
    "something that decides which way the unit goes changed between forward and backward: a flag, train or eval mode, "
    "hooks that were attached or detached, a branch on a value";
constexpr std::string_view kOtherShape =
    "a shape that depends on values which the second run computes otherwise, or state outside of the unit";
constexpr std::string_view kOtherKind =
    "a dtype or a device that the unit takes from state outside of it, such as a default that was changed or autocast "
    "that was switched inside of the unit";
constexpr std::string_view kOtherValues =
    "random numbers that do not come from torch's default generators, state that the unit changes itself (running "
    "statistics, a counter), a parameter or buffer that was changed since, or an operator that is not deterministic";

std::string describe(const at::Tensor& tensor) {
  return concat(tensor.toString(), ' ', autograd::listed_sizes(tensor));
}

at::Tensor plain_copy(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

// To the last bit, so that equal NaNs are equal and 0.0 is not -0.0.
bool same_values(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = plain_copy(a);
  const at::Tensor y = plain_copy(b);
  return x.nbytes() == y.nbytes() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

// Values of sparse, nested and quantised tensors are not compared.
bool comparable(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested() && !tensor.is_meta();
}

class Comparison {
 public:
  Comparison(const std::string& region, const std::vector<SavedTensor>& first, const std::vector<Captured>& second)
      : region_(region), first_(first), second_(second) {}

  void check(std::size_t index) const {
    const SavedTensor& saved = first_[index];
    const at::Tensor& found = second_[index].tensor;
    if (autograd::listed_sizes(found) != c10::IntArrayRef(saved.sizes)) fail(index, "another shape", kOtherShape);
    if (found.dtype() != saved.options.dtype() || found.device() != saved.options.device() ||
        found.layout() != saved.options.layout()) {
      fail(index, "another type", kOtherKind);
    }
    if (saved.value.defined() && comparable(found) && !same_values(saved.value, found)) {
      fail(index, "other values", kOtherValues);
    }
  }

 private:
  [[noreturn]] void fail(std::size_t index, std::string_view what, std::string_view cause) const {
    const SavedTensor& saved = first_[index];
    const std::string op = saved.op.empty() ? std::string() : concat(", saved by ", saved.op, ",");
    NEAP_USER_ERROR("[recompute] unit '", region_, "': expected saved tensor ", index + 1, " of ", first_.size(), op,
                    " to be computed again as it was: ", saved.describe(), "; found ", what, ": ",
                    describe(second_[index].tensor), "; usual cause: ", cause,
                    saved.value.defined() ? "" : "; debug mode names the first tensor whose values differ");
  }

  const std::string& region_;
  const std::vector<SavedTensor>& first_;
  const std::vector<Captured>& second_;
};

}  // namespace

SavedTensor::SavedTensor(const at::Tensor& tensor, bool with_value) : options(tensor.options()), version(tensor) {
  const c10::IntArrayRef listed = autograd::listed_sizes(tensor);
  sizes.assign(listed.begin(), listed.end());
  if (!with_value) return;
  if (comparable(tensor)) value = tensor.detach().clone();
  op = autograd::current_op_name();
}

std::string SavedTensor::describe() const {
  return concat(c10::toString(options.computeDispatchKey()), ' ', c10::typeMetaToScalarType(options.dtype()), ' ',
                c10::IntArrayRef(sizes));
}

Captured::Captured(const at::Tensor& t) : tensor(autograd::detached_alias(t)), version(t) {}

void check_second_run(const std::string& region, const std::vector<SavedTensor>& first,
                      const std::vector<Captured>& second, std::size_t surplus) {
  const Comparison comparison(region, first, second);
  // A difference in a tensor says more than the count that follows from it.
  for (std::size_t i = 0; i < second.size(); ++i) comparison.check(i);
  NEAP_CHECK(second.size() == first.size() && surplus == 0, "[recompute] unit '", region,
             "': expected its second run to save ", first.size(), " tensors, as the first did; found ",
             second.size() + surplus, "; usual cause: ", kOtherPath);
}

}  // namespace neap::recompute::internal
