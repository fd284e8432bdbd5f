// torch-free
#include "neap/offload/options.h"

#include <charconv>

#include "neap/base/error.h"

namespace neap::offload {
namespace {

void check_bytes(Bytes bytes, const char* option) {
  NEAP_CHECK(bytes.count >= 0, "[offload.", option, "] expected a number of bytes, 0 or more; found ", bytes.count);
}

}  // namespace

void validate(const Options& options) {
  NEAP_CHECK(options.mode == Mode::kAsync || options.mode == Mode::kSync || options.mode == Mode::kOff,
             "[offload.mode] expected async, sync or off; found the number ", static_cast<int>(options.mode));
  check_bytes(options.device_budget, "device_budget");
  check_bytes(options.min_bytes, "min_bytes");
  check_bytes(options.max_in_flight, "max_in_flight");
  check_bytes(options.host_cache_limit, "host_cache_limit");
  if (options.device_limit) check_bytes(*options.device_limit, "device_limit");
  if (options.host_limit) check_bytes(*options.host_limit, "host_limit");
  NEAP_CHECK(options.keep_last.value_or(0) >= 0, "[offload.keep_last] expected a number of units, 0 or more; found ",
             *options.keep_last);
  if (const auto* layers = std::get_if<Layers>(&options.prefetch)) {
    NEAP_CHECK(layers->count >= 0, "[offload.prefetch] expected a number of layers, 0 or more; found ", layers->count);
  } else if (const auto* bytes = std::get_if<Bytes>(&options.prefetch)) {
    check_bytes(*bytes, "prefetch");
  }
}

void validate(const Options& options, int64_t num_units) {
  validate(options);
  if (const auto* layers = std::get_if<Layers>(&options.prefetch)) {
    NEAP_CHECK(layers->count < num_units, "[offload.prefetch] expected fewer layers than there are units, 0 to ",
               num_units - 1, "; found ", layers->count, "; prefetching every unit would leave nothing offloaded");
  }
  NEAP_CHECK(options.keep_last.value_or(0) <= num_units, "[offload.keep_last] expected 0 to ", num_units,
             ", the number of units; found ", *options.keep_last);
}

Mode parse_mode(std::string_view text, std::string_view what) {
  for (const Mode mode : {Mode::kAsync, Mode::kSync, Mode::kOff})
    if (text == to_string(mode)) return mode;
  NEAP_USER_ERROR("[", what, "] expected async, sync or off; found '", text, "'");
}

Prefetch parse_prefetch(std::string_view text, std::string_view what) {
  if (text == "automatic") return Automatic{};
  int layers = 0;
  const auto [rest, status] = std::from_chars(text.data(), text.data() + text.size(), layers);
  if (status == std::errc() && rest == text.data() + text.size() && layers >= 0) return Layers{layers};
  // A bare number that is no layer count (negative, too large) is not a number of bytes either: those carry a unit.
  NEAP_CHECK(!text.empty() && text.back() == 'B', "[", what,
             "] expected automatic, a number of layers (1) or of bytes with a unit (64MiB); found '", text, "'");
  return parse_bytes(text, what);
}

std::string to_string(Mode mode) {
  switch (mode) {
    case Mode::kAsync:
      return "async";
    case Mode::kSync:
      return "sync";
    case Mode::kOff:
      return "off";
  }
  return "unknown";
}

std::string to_string(const Prefetch& prefetch) {
  if (const auto* layers = std::get_if<Layers>(&prefetch)) return internal::concat(layers->count, " layers");
  if (const auto* bytes = std::get_if<Bytes>(&prefetch)) return to_string(*bytes);
  return "automatic";
}

}  // namespace neap::offload
