#include "neap/base/bytes.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "neap/base/error.h"

namespace neap {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};

constexpr std::array kUnits = {Unit{"B", 1},
                               Unit{"KiB", 1024.0},
                               Unit{"MiB", 1048576.0},
                               Unit{"GiB", 1073741824.0},
                               Unit{"TiB", 1099511627776.0},
                               Unit{"KB", 1e3},
                               Unit{"MB", 1e6},
                               Unit{"GB", 1e9},
                               Unit{"TB", 1e12}};

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

}  // namespace

std::string to_string(Bytes bytes) {
  const double magnitude = std::abs(static_cast<double>(bytes.count));
  if (magnitude < 1024) return std::to_string(bytes.count) + " B";
  constexpr std::array<std::string_view, 4> kNames = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes.count) / 1024;
  size_t i = 0;
  for (; std::abs(value) >= 1024 && i + 1 < kNames.size(); ++i) value /= 1024;
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, "%.2f %s", value, kNames[i].data());
  return buffer;
}

std::ostream& operator<<(std::ostream& out, Bytes bytes) { return out << to_string(bytes); }

Bytes parse_bytes(std::string_view text, std::string_view what) {
  const std::string_view whole = trim(text);
  double value = 0;
  const auto [rest, status] = std::from_chars(whole.data(), whole.data() + whole.size(), value);
  const std::string_view unit = trim(whole.substr(static_cast<size_t>(rest - whole.data())));
  double scale = unit.empty() ? 1 : 0;
  for (const Unit& known : kUnits)
    if (unit == known.name) scale = known.bytes;
  NEAP_CHECK(status == std::errc() && scale != 0, "[", what,
             "] expected a number of bytes such as 0, 4096, 512MiB or 1.5GiB; found '", text, "'");
  const double total = value * scale;
  NEAP_CHECK(std::isfinite(total) && total >= 0 && total < static_cast<double>(std::numeric_limits<int64_t>::max()),
             "[", what, "] expected a number of bytes from 0 to 8 EiB; found '", text, "'");
  return Bytes(std::llround(total));
}

}  // namespace neap
