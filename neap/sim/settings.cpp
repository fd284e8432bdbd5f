// torch-free
#include "neap/sim/settings.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <set>
#include <string>

#include "neap/base/error.h"
#include "neap/sim/engine/config.h"

namespace neap::sim {
namespace {

// A value and what to say about it when it cannot be understood.
struct Text {
  std::string_view value;
  std::string path;  // "NEAP_SIM.d2h"

  [[noreturn]] void reject(std::string_view expected) const {
    NEAP_USER_ERROR("[", path, "] expected ", expected, "; found '", value, "'");
  }
};

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\n";
  const auto first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

// The number at the front; the rest is its unit.
double number(const Text& text, std::string_view& unit, std::string_view expected) {
  double value = 0;
  const auto [rest, status] = std::from_chars(text.value.data(), text.value.data() + text.value.size(), value);
  if (status != std::errc() || !std::isfinite(value) || value < 0) text.reject(expected);
  unit = trim(text.value.substr(static_cast<std::size_t>(rest - text.value.data())));
  return value;
}

double plain_number(const Text& text) {
  constexpr std::string_view kExpected = "a number that is not negative";
  std::string_view unit;
  const double value = number(text, unit, kExpected);
  if (!unit.empty()) text.reject(kExpected);
  return value;
}

double nanoseconds(const Text& text) {
  constexpr std::string_view kExpected = "a time such as 5us, 250ns, 1.5ms or 0";
  constexpr std::array<std::pair<std::string_view, double>, 4> kUnits = {
      {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}}};
  std::string_view unit;
  const double value = number(text, unit, kExpected);
  if (value == 0 && unit.empty()) return 0;
  for (const auto& [name, scale] : kUnits)
    if (unit == name) return value * scale;
  text.reject(kExpected);
}

// In GB/s; zero stands for unlimited.
double rate(const Text& text, bool may_be_unlimited) {
  if (may_be_unlimited && text.value == "unlimited") return 0;
  const std::string_view expected =
      may_be_unlimited ? "a rate above zero such as 25GB/s, or unlimited" : "a rate above zero such as 1500GB/s";
  if (!text.value.ends_with("B/s")) text.reject(expected);
  const double gbps =
      static_cast<double>(parse_bytes(text.value.substr(0, text.value.size() - 2), text.path).count) * 1e-9;
  if (gbps <= 0) text.reject(expected);
  return gbps;
}

bool flag(const Text& text) {
  if (text.value == "true" || text.value == "on") return true;
  if (text.value == "false" || text.value == "off") return false;
  text.reject("true or false");
}

Clock clock(const Text& text) {
  if (text.value == "virtual") return Clock::kVirtual;
  if (text.value == "real") return Clock::kReal;
  text.reject("virtual or real");
}

Bytes limit(const Text& text) { return text.value == "unlimited" ? Bytes(0) : parse_bytes(text.value, text.path); }

int whole_number(const Text& text) {
  int value = 0;
  const char* end = text.value.data() + text.value.size();
  const auto [rest, status] = std::from_chars(text.value.data(), end, value);
  if (status != std::errc() || rest != end) text.reject("a whole number");
  return value;
}

struct Setting {
  std::string_view key;
  void (*apply)(DeviceConfig&, const Text&);
};

constexpr std::array kSettings = {
    Setting{"count", [](DeviceConfig& c, const Text& t) { c.devices = whole_number(t); }},
    Setting{"capacity", [](DeviceConfig& c, const Text& t) { c.capacity = parse_bytes(t.value, t.path); }},
    Setting{"pinned_capacity", [](DeviceConfig& c, const Text& t) { c.pinned_capacity = limit(t); }},
    Setting{"d2h", [](DeviceConfig& c, const Text& t) { c.d2h_gbps = rate(t, true); }},
    Setting{"h2d", [](DeviceConfig& c, const Text& t) { c.h2d_gbps = rate(t, true); }},
    Setting{"peer", [](DeviceConfig& c, const Text& t) { c.peer_gbps = rate(t, true); }},
    Setting{"latency", [](DeviceConfig& c, const Text& t) { c.latency_ns = nanoseconds(t); }},
    Setting{"realtime_copies", [](DeviceConfig& c, const Text& t) { c.realtime_copies = flag(t); }},
    Setting{"clock", [](DeviceConfig& c, const Text& t) { c.clock = clock(t); }},
    Setting{"gflops", [](DeviceConfig& c, const Text& t) { c.gflops = plain_number(t); }},
    Setting{"hbm", [](DeviceConfig& c, const Text& t) { c.hbm_gbps = rate(t, false); }},
    Setting{"kernel_min", [](DeviceConfig& c, const Text& t) { c.kernel_min_ns = nanoseconds(t); }},
    Setting{"launch", [](DeviceConfig& c, const Text& t) { c.launch_ns = nanoseconds(t); }},
    Setting{"event", [](DeviceConfig& c, const Text& t) { c.event_ns = nanoseconds(t); }},
    Setting{"hazard_check", [](DeviceConfig& c, const Text& t) { c.hazard_check = flag(t); }},
    Setting{"strict_free", [](DeviceConfig& c, const Text& t) { c.strict_free = flag(t); }},
    Setting{"poison", [](DeviceConfig& c, const Text& t) { c.poison = flag(t); }},
};

std::string known_keys() {
  std::string keys;
  for (const Setting& setting : kSettings) keys.append(keys.empty() ? "" : ", ").append(setting.key);
  return keys;
}

}  // namespace

void apply_setting(DeviceConfig& config, std::string_view key, std::string_view value, std::string_view where) {
  for (const Setting& setting : kSettings) {
    if (setting.key != key) continue;
    setting.apply(config, {trim(value), internal::concat(where, ".", key)});
    return;
  }
  NEAP_USER_ERROR("[", where, "] expected one of ", known_keys(), "; found '", key, "'");
}

DeviceConfig parse_settings(std::string_view text, const DeviceConfig& base, std::string_view where) {
  DeviceConfig config = base;
  std::set<std::string_view> seen;
  for (std::string_view rest = trim(text); !rest.empty();) {
    const auto comma = rest.find(',');
    const std::string_view entry = trim(rest.substr(0, comma));
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const auto equals = entry.find('=');
    NEAP_CHECK(equals != std::string_view::npos, "[", where,
               "] expected key=value, separated by commas, such as capacity=512MiB,d2h=25GB/s; found '", entry, "'");
    const std::string_view key = trim(entry.substr(0, equals));
    NEAP_CHECK(seen.insert(key).second, "[", where, ".", key, "] expected once; found twice");
    apply_setting(config, key, entry.substr(equals + 1), where);
  }
  check_config(config);
  return config;
}

DeviceConfig settings_from_environment(const DeviceConfig& base) {
  const char* text = std::getenv(kSettingsVariable);
  return text != nullptr ? parse_settings(text, base) : base;
}

}  // namespace neap::sim
