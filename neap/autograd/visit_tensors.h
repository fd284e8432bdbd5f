// Calls a function with every tensor inside a value: a Tensor, or any nesting of vectors, arrays, optionals, pairs and
// tuples of them. Values of other types (numbers, strings) hold none.
//
// A struct of one's own takes part by a function beside it, found by its namespace:
//   template <class Visit> void visit_tensors(const Output& out, Visit&& visit) { visit(out.logits); visit(out.loss); }
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>

namespace neap::autograd {
namespace internal {

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <class T, class Visit>
concept VisitsItself = requires(const T& value, Visit& visit) {
  visit_tensors(value, visit);
};

}  // namespace internal

template <class T, class Visit>
void for_each_tensor(const T& value, Visit&& visit) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    visit(static_cast<const at::Tensor&>(value));
  } else if constexpr (internal::VisitsItself<T, std::remove_reference_t<Visit>>) {
    visit_tensors(value, visit);
  } else if constexpr (internal::kIsOptional<T>) {
    if (value.has_value()) for_each_tensor(*value, visit);
  } else if constexpr (std::ranges::input_range<const T>) {
    // A range of numbers or characters costs nothing: the loop body is empty.
    for (const auto& element : value) for_each_tensor(element, visit);
  } else if constexpr (internal::TupleLike<T>) {
    std::apply([&](const auto&... parts) { (for_each_tensor(parts, visit), ...); }, value);
  }
}

}  // namespace neap::autograd
