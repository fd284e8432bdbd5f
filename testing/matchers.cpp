#include "testing/matchers.h"

#include <cstring>
#include <sstream>
#include <string>

namespace neap::testing {
namespace {

at::Tensor plain_cpu(const at::Tensor& t) { return t.detach().resolve_conj().resolve_neg().cpu().contiguous(); }

std::string element(const at::Tensor& cpu, int64_t i) {
  std::ostringstream out;
  out.precision(17);
  const auto value = cpu.view({-1})[i].item();
  if (value.isFloatingPoint()) {
    out << value.toDouble();
  } else if (value.isComplex()) {
    out << value.toComplexDouble();
  } else {
    out << value.toLong();
  }
  return out.str();
}

}  // namespace

::testing::AssertionResult bit_equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined())
    return ::testing::AssertionFailure() << (a.defined() ? "the second" : "the first") << " tensor is undefined";
  if (!a.defined()) return ::testing::AssertionSuccess();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type())
    return ::testing::AssertionFailure() << a.toString() << a.sizes() << " against " << b.toString() << b.sizes();
  const auto x = plain_cpu(a), y = plain_cpu(b);
  const auto* p = static_cast<const char*>(x.const_data_ptr());
  const auto* q = static_cast<const char*>(y.const_data_ptr());
  if (x.nbytes() == 0 || std::memcmp(p, q, x.nbytes()) == 0) return ::testing::AssertionSuccess();
  const std::size_t size = x.itemsize();
  int64_t first = -1, different = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (std::memcmp(p + i * size, q + i * size, size) == 0) continue;
    if (first < 0) first = i;
    ++different;
  }
  return ::testing::AssertionFailure() << different << " of " << x.numel() << " elements of " << x.toString()
                                       << x.sizes() << " differ, the first at " << first << ": " << element(x, first)
                                       << " against " << element(y, first);
}

::testing::AssertionResult bit_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << a.size() << " tensors against " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i)
    if (auto equal = bit_equal(a[i], b[i]); !equal) return equal << " (tensor " << i << ")";
  return ::testing::AssertionSuccess();
}

}  // namespace neap::testing
