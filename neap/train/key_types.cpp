// torch-free
#include "neap/train/key_types.h"

#include <array>
#include <charconv>
#include <cmath>
#include <sstream>

#include "neap/base/error.h"

namespace neap::train::internal {
namespace {

template <class T>
std::function<std::string(const RunConfig&)> show_with(Access<T> at, std::string (*format)(const T&)) {
  // Accessors are written once, for the mutable config; showing only reads.
  return [at, format](const RunConfig& config) { return format(at(const_cast<RunConfig&>(config))); };
}

std::string format_number(const double& value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

std::optional<double> parse_number(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_integer(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The shortest text that parses back to the same number of bytes.
std::string format_bytes(const Bytes& bytes) {
  const std::array<std::pair<int, const char*>, 3> units = {{{30, "GiB"}, {20, "MiB"}, {10, "KiB"}}};
  for (const auto& [shift, unit] : units) {
    const int64_t size = int64_t{1} << shift;
    if (bytes.count != 0 && bytes.count % size == 0) return std::to_string(bytes.count / size) + unit;
  }
  return std::to_string(bytes.count);
}

std::string format_rate(const Bytes& rate) {
  if (rate.count == 0) return "unlimited";
  if (rate.count % 1'000'000'000 == 0) return std::to_string(rate.count / 1'000'000'000) + "GB/s";
  if (rate.count % 1'000'000 == 0) return std::to_string(rate.count / 1'000'000) + "MB/s";
  return std::to_string(rate.count) + "B/s";
}

std::string format_duration(const int64_t& ns) {
  if (ns == 0) return "0";
  if (ns % 1'000'000'000 == 0) return std::to_string(ns / 1'000'000'000) + "s";
  if (ns % 1'000'000 == 0) return std::to_string(ns / 1'000'000) + "ms";
  if (ns % 1'000 == 0) return std::to_string(ns / 1'000) + "us";
  return std::to_string(ns) + "ns";
}

// Double quotes keep patterns such as model.layers.{*} one scalar, also inside a YAML flow list. Line ends within them
// would be read as spaces, so control characters are written as escapes.
std::string quoted(const std::string& text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

Bytes bytes_of(const std::string& path, const RawValue& raw, const std::string& text, const std::string& expected) {
  try {
    return parse_bytes(text, path);
  } catch (const UserError&) {
    throw_bad_value(path, raw, expected);
  }
}

constexpr const char* kSize = "a size from 0 to 8EiB such as 4096, 512MiB or 1.5GiB";

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(' ') - first + 1));
}

struct Optional {
  std::string type, expected;
  std::string none;  // the word for no value
};

// `parse` returns nothing for what the key does not take.
template <class T, class Parse, class Format>
Key optional_key(std::string path, Access<std::optional<T>> at, const Optional& words, Parse parse, Format format,
                 std::string help) {
  Key key{.path = path,
          .type = words.type + " or " + words.none,
          .range = "",
          .help = std::move(help),
          .set = {},
          .show = {}};
  key.set = [path, at, words, parse](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, words.expected);
    const std::optional<T> value = text == words.none ? std::nullopt : parse(text);
    if (text != words.none && !value) throw_bad_value(path, raw, words.expected);
    at(config) = value;
  };
  key.show = [at, words, format](const RunConfig& config) {
    const std::optional<T> value = at(const_cast<RunConfig&>(config));
    return value ? format(*value) : words.none;
  };
  return key;
}

Key optional_integer_key(std::string path, Access<std::optional<int64_t>> at, int64_t low, std::string none,
                         std::string help) {
  const std::string expected = neap::internal::concat("an integer of at least ", low, ", or ", none);
  return optional_key<int64_t>(
      std::move(path), std::move(at),
      {.type = neap::internal::concat("integer from ", low), .expected = expected, .none = std::move(none)},
      [low](const std::string& text) {
        const auto value = parse_integer(text);
        return value && *value >= low ? value : std::nullopt;
      },
      [](int64_t value) { return std::to_string(value); }, std::move(help));
}

}  // namespace

void throw_bad_value(const std::string& path, const RawValue& raw, const std::string& expected) {
  std::string found;
  for (const std::string& item : raw.items) found += (found.empty() ? "" : ", ") + item;
  found = raw.is_list ? "the list [" + found + "]" : "\"" + found + "\"";
  NEAP_USER_ERROR("[", raw.place, "] ", path, ": expected ", expected, "; found ", found);
}

const std::string& scalar(const std::string& path, const RawValue& raw, const std::string& expected) {
  if (raw.is_list || raw.items.size() != 1) throw_bad_value(path, raw, expected);
  return raw.items.front();
}

Key integer_key(std::string path, Access<int64_t> at, int64_t low, int64_t high, std::string help) {
  const bool open = high == std::numeric_limits<int64_t>::max();
  const std::string range =
      open ? "at least " + std::to_string(low) : "from " + std::to_string(low) + " to " + std::to_string(high);
  Key key{.path = path, .type = "integer", .range = range, .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string expected = "an integer " + range;
    const auto value = parse_integer(scalar(path, raw, expected));
    if (!value || *value < low || *value > high) throw_bad_value(path, raw, expected);
    at(config) = *value;
  };
  key.show = show_with<int64_t>(at, [](const int64_t& value) { return std::to_string(value); });
  return key;
}

Key number_key(std::string path, Access<double> at, double low, double high, std::string help) {
  const std::string range =
      std::isinf(high) ? "at least " + format_number(low) : "from " + format_number(low) + " to " + format_number(high);
  Key key{.path = path, .type = "number", .range = range, .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string expected = "a number " + range;
    const auto value = parse_number(scalar(path, raw, expected));
    if (!value || *value < low || *value > high) throw_bad_value(path, raw, expected);
    at(config) = *value;
  };
  key.show = show_with<double>(at, format_number);
  return key;
}

Key boolean_key(std::string path, Access<bool> at, std::string help) {
  Key key{.path = path, .type = "true or false", .range = "", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, "true or false");
    if (text != "true" && text != "false") throw_bad_value(path, raw, "true or false");
    at(config) = text == "true";
  };
  key.show = show_with<bool>(at, [](const bool& value) { return std::string(value ? "true" : "false"); });
  return key;
}

Key text_key(std::string path, Access<std::string> at, bool required, std::string help) {
  Key key{
      .path = path, .type = "text", .range = "", .help = std::move(help), .required = required, .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, "a text");
    if (required && text.empty()) throw_bad_value(path, raw, "a text that is not empty");
    at(config) = text;
  };
  key.show = show_with<std::string>(at, [](const std::string& value) { return quoted(value); });
  return key;
}

Key text_list_key(std::string path, Access<std::vector<std::string>> at, std::string type, std::string help) {
  Key key{.path = path, .type = std::move(type), .range = "", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    for (const std::string& item : raw.items) {
      if (item.empty()) throw_bad_value(path, raw, "texts that are not empty");
    }
    at(config) = raw.items;
  };
  key.show = show_with<std::vector<std::string>>(at, [](const std::vector<std::string>& items) {
    std::string out;
    for (const std::string& item : items) out += (out.empty() ? "" : ", ") + quoted(item);
    return "[" + out + "]";
  });
  return key;
}

Key number_list_key(std::string path, Access<std::vector<double>> at, size_t count, double low, double below,
                    std::string help) {
  const std::string range = "each from " + format_number(low) + " to less than " + format_number(below);
  Key key{.path = path,
          .type = std::to_string(count) + " numbers",
          .range = range,
          .help = std::move(help),
          .set = {},
          .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string expected = "a list of " + std::to_string(count) + " numbers, " + range;
    std::vector<double> values;
    for (const std::string& item : raw.items) {
      const auto value = parse_number(item);
      if (!value || *value < low || *value >= below) throw_bad_value(path, raw, expected);
      values.push_back(*value);
    }
    if (values.size() != count) throw_bad_value(path, raw, expected);
    at(config) = std::move(values);
  };
  key.show = show_with<std::vector<double>>(at, [](const std::vector<double>& values) {
    std::string out;
    for (const double value : values) out += (out.empty() ? "" : ", ") + format_number(value);
    return "[" + out + "]";
  });
  return key;
}

Key bytes_key(std::string path, Access<Bytes> at, std::string help) {
  Key key{.path = path, .type = "size", .range = "at least 0", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    at(config) = bytes_of(path, raw, scalar(path, raw, kSize), kSize);
  };
  key.show = show_with<Bytes>(at, format_bytes);
  return key;
}

Key optional_bytes_key(std::string path, Access<std::optional<Bytes>> at, std::string none, std::string help) {
  const std::string expected = std::string(kSize) + ", or " + none;
  Key key{.path = path, .type = "size or " + none, .range = "", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, expected);
    at(config) = text == none ? std::nullopt : std::optional(bytes_of(path, raw, text, expected));
  };
  key.show = [=](const RunConfig& config) {
    const auto value = at(const_cast<RunConfig&>(config));
    return value ? format_bytes(*value) : none;
  };
  return key;
}

Key optional_integer_key(std::string path, Access<std::optional<int>> at, std::string none, std::string help) {
  constexpr int kLargest = 1'000'000;
  const std::string expected = "an integer from 0 to " + std::to_string(kLargest) + ", or " + none;
  return optional_key<int>(
      std::move(path), std::move(at), {.type = "integer", .expected = expected, .none = std::move(none)},
      [](const std::string& text) -> std::optional<int> {
        const auto value = parse_integer(text);
        return value && *value >= 0 && *value <= kLargest ? std::optional(static_cast<int>(*value)) : std::nullopt;
      },
      [](int value) { return std::to_string(value); }, std::move(help));
}

Key optional_count_key(std::string path, Access<std::optional<int64_t>> at, std::string none, std::string help) {
  return optional_integer_key(std::move(path), std::move(at), 1, std::move(none), std::move(help));
}

Key optional_token_key(std::string path, Access<std::optional<int64_t>> at, std::string none, std::string help) {
  return optional_integer_key(std::move(path), std::move(at), 0, std::move(none), std::move(help));
}

Key optional_number_key(std::string path, Access<std::optional<double>> at, std::string none, std::string help) {
  const std::string expected = "a number above 0, or " + none;
  return optional_key<double>(
      std::move(path), std::move(at), {.type = "number above 0", .expected = expected, .none = std::move(none)},
      [](const std::string& text) {
        const auto value = parse_number(text);
        return value && *value > 0 ? value : std::nullopt;
      },
      [](double value) { return format_number(value); }, std::move(help));
}

Key rate_key(std::string path, Access<Bytes> at, std::string help) {
  const std::string expected = "a rate such as 25GB/s, or unlimited";
  Key key{.path = path, .type = "rate or unlimited", .range = "", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, expected);
    if (text == "unlimited" || text == "0") {
      at(config) = Bytes(0);
      return;
    }
    if (!text.ends_with("/s")) throw_bad_value(path, raw, expected);
    const Bytes rate = bytes_of(path, raw, trimmed(std::string_view(text).substr(0, text.size() - 2)), expected);
    if (rate.count <= 0) throw_bad_value(path, raw, expected);
    at(config) = rate;
  };
  key.show = show_with<Bytes>(at, format_rate);
  return key;
}

Key duration_key(std::string path, Access<int64_t> at, std::string help) {
  const std::string expected = "a time such as 10us, 250ns or 1.5ms, up to 1h";
  Key key{.path = path, .type = "time", .range = "at least 0", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, expected);
    const size_t split = text.find_first_not_of("0123456789.+-eE");
    const auto value = parse_number(trimmed(std::string_view(text).substr(0, split)));
    const std::string unit = split == std::string::npos ? "" : trimmed(std::string_view(text).substr(split));
    double scale = 0;
    for (const auto& [name, factor] :
         std::initializer_list<std::pair<const char*, double>>{{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}}) {
      if (unit == name) scale = factor;
    }
    if (unit.empty() && value == 0.0) scale = 1;
    if (!value || scale == 0 || *value < 0 || *value * scale > 3.6e12) throw_bad_value(path, raw, expected);
    at(config) = std::llround(*value * scale);
  };
  key.show = show_with<int64_t>(at, format_duration);
  return key;
}

Key prefetch_key(std::string path, Access<offload::Prefetch> at, std::string help) {
  const std::string expected = "automatic, a number of layers (2) or a size with its unit (64MiB)";
  Key key{
      .path = path, .type = "automatic, layers or size", .range = "", .help = std::move(help), .set = {}, .show = {}};
  key.set = [=](RunConfig& config, const RawValue& raw) {
    const std::string& text = scalar(path, raw, expected);
    if (text == "automatic") {
      at(config) = offload::Automatic{};
    } else if (const auto layers = parse_integer(text)) {
      if (*layers < 0 || *layers > 1'000'000) throw_bad_value(path, raw, expected);
      at(config) = offload::Layers{static_cast<int>(*layers)};
    } else {
      at(config) = bytes_of(path, raw, text, expected);
    }
  };
  key.show = show_with<offload::Prefetch>(at, [](const offload::Prefetch& value) {
    if (const auto* layers = std::get_if<offload::Layers>(&value)) return std::to_string(layers->count);
    if (const auto* bytes = std::get_if<Bytes>(&value)) {
      // A size without a unit would read as a number of layers.
      const std::string text = format_bytes(*bytes);
      return text.ends_with('B') ? text : text + "B";
    }
    return std::string("automatic");
  });
  return key;
}

}  // namespace neap::train::internal
