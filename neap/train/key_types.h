// torch-free
// The types a key can have. Each function makes a Key whose parser names place, path, expectation and finding in its
// error. A key reaches its value through an accessor, `[](RunConfig& c) -> int64_t& { return c.train.steps; }`.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "neap/train/schema.h"

namespace neap::train::internal {

template <class T>
using Access = std::function<T&(RunConfig&)>;

// Throws `[place] path: expected …; found "…"`.
[[noreturn]] void throw_bad_value(const std::string& path, const RawValue& raw, const std::string& expected);

// The single scalar of `raw`, or the error.
const std::string& scalar(const std::string& path, const RawValue& raw, const std::string& expected);

Key integer_key(std::string path, Access<int64_t> at, int64_t low, int64_t high, std::string help);
Key number_key(std::string path, Access<double> at, double low, double high, std::string help);
Key boolean_key(std::string path, Access<bool> at, std::string help);
Key text_key(std::string path, Access<std::string> at, bool required, std::string help);
Key text_list_key(std::string path, Access<std::vector<std::string>> at, std::string type, std::string help);
// Exactly `count` numbers, each in [low, below).
Key number_list_key(std::string path, Access<std::vector<double>> at, size_t count, double low, double below,
                    std::string help);
Key bytes_key(std::string path, Access<Bytes> at, std::string help);
// `none` is the word for no value.
Key optional_bytes_key(std::string path, Access<std::optional<Bytes>> at, std::string none, std::string help);
Key optional_integer_key(std::string path, Access<std::optional<int>> at, std::string none, std::string help);
Key optional_count_key(std::string path, Access<std::optional<int64_t>> at, std::string none, std::string help);
// Above 0.
// At least 0.
Key optional_token_key(std::string path, Access<std::optional<int64_t>> at, std::string none, std::string help);
Key optional_number_key(std::string path, Access<std::optional<double>> at, std::string none, std::string help);
// "25GB/s"; "unlimited" or 0 is no limit.
Key rate_key(std::string path, Access<Bytes> at, std::string help);
// "10us", "2.5 ms"; a bare number has no unit and is an error, except 0.
Key duration_key(std::string path, Access<int64_t> at, std::string help);
// An integer is a number of layers, a size a number of bytes, or "automatic".
Key prefetch_key(std::string path, Access<offload::Prefetch> at, std::string help);

template <class E>
Key choice_key(std::string path, Access<E> at, std::vector<std::pair<std::string, E>> choices, std::string help) {
  std::string names;
  for (size_t i = 0; i < choices.size(); ++i) {
    names += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i].first;
  }
  Key key{.path = path, .type = names, .range = "", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, names);
    for (const auto& [name, value] : choices) {
      if (name == text) {
        at(config) = value;
        return;
      }
    }
    throw_bad_value(path, raw, names);
  };
  key.show = [=](const RunConfig& config) {
    for (const auto& [name, value] : choices) {
      if (value == at(const_cast<RunConfig&>(config))) return name;
    }
    return std::string("?");
  };
  return key;
}

}  // namespace neap::train::internal
