// torch-free
// Reads fields of one JSON object and gathers everything that is wrong with it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "neap/base/error.h"

namespace neap::models::internal {

class JsonReader {
 public:
  using Json = nlohmann::json;

  // Both live longer. `prefix` stands before the keys in messages.
  JsonReader(const Json& object, std::vector<std::string>& faults, std::string prefix = "")
      : object_(object), faults_(faults), prefix_(std::move(prefix)) {}

  bool present(const char* key) const { return object_.contains(key); }
  bool has(const char* key) const { return present(key) && !at(key).is_null(); }
  const Json& at(const char* key) const { return object_.at(key); }
  // For an object within this one; its faults go to the same list.
  JsonReader inner(const char* key) const { return {at(key), faults_, neap::internal::concat(prefix_, key, ".")}; }

  // Leaves `value` when the key is not there or null.
  template <class T>
  void read(const char* key, T& value) {
    if (!has(key)) return;
    if (fits<T>(at(key))) {
      value = at(key).get<T>();
    } else {
      fault(key, neap::internal::concat("has the wrong type: ", at(key).dump()));
    }
  }
  template <class T>
  void read(const char* key, std::optional<T>& value) {
    if (has(key)) value = get<T>(key, {});
  }
  template <class T>
  void require(const char* key, T& value) {
    if (!has(key)) return fault(key, "is missing");
    read(key, value);
  }
  template <class T>
  T get(const char* key, T fallback) {
    read(key, fallback);
    return fallback;
  }
  // A field that is not implemented at another value than this.
  template <class T>
  void expect(const char* key, const T& only) {
    const T found = get<T>(key, only);
    if (found == only) return;
    if constexpr (std::is_same_v<T, std::string>) {
      fault(key, neap::internal::concat("'", found, "' is not supported (", only, " is)"));
    } else {
      fault(key, neap::internal::concat("other than ", only, " is not supported"));
    }
  }
  void fault(std::string_view key, std::string_view what) {
    faults_.push_back(neap::internal::concat(prefix_, key, " ", what));
  }

 private:
  template <class T>
  static bool fits(const Json& found) {
    if constexpr (std::is_same_v<T, bool>) return found.is_boolean();
    if constexpr (std::is_same_v<T, std::string>) return found.is_string();
    if constexpr (std::is_same_v<T, double>) return found.is_number();
    if constexpr (std::is_same_v<T, int64_t>) return found.is_number_integer();
    return false;
  }

  const Json& object_;
  std::vector<std::string>& faults_;
  std::string prefix_;
};

}  // namespace neap::models::internal
