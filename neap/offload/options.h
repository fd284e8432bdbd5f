// torch-free
// What the offload engine is asked to do. Start at engine.h; the meaning of each option is written here once.
//
// Zero means zero, never "unlimited": a budget of 0 lets nothing stay, a cache limit of 0 keeps nothing idle.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "neap/base/bytes.h"

namespace at {
class Tensor;
}

namespace neap::offload {

// kAsync overlaps copies with compute. kSync copies on the compute stream and waits for nothing to learn: the plain
// way, for comparison and for debugging. kOff attaches units but leaves autograd alone.
enum class Mode { kAsync, kSync, kOff };

// How far ahead of its use a storage comes back: the units before the one that backward is in, a number of bytes, or as
// many bytes as measurements of this run ask for.
struct Layers {
  int count = 1;
  friend bool operator==(const Layers&, const Layers&) = default;
};
struct Automatic {
  friend bool operator==(const Automatic&, const Automatic&) = default;
};
using Prefetch = std::variant<Automatic, Layers, Bytes>;

enum class Decision { kKeep, kOffload };

// Asked for every saved tensor that could leave, on the thread that saves it; must not change the tensor. `op` is the
// operator that saves it ("aten::mul"), empty when unknown. May throw: forward then fails with that exception and
// nothing has happened.
using Policy = std::function<Decision(const at::Tensor& tensor, std::string_view unit, std::string_view op)>;

struct Options {
  Mode mode = Mode::kAsync;
  // Saved activations that may stay on the device; the rest leaves, farthest from its use first.
  Bytes device_budget{0};
  // Smaller storages stay: below some size a copy costs more than the memory is worth.
  Bytes min_bytes{int64_t{1} << 20};
  Prefetch prefetch = Automatic{};
  // So many units at the end of forward stay, since backward begins with them. None: one unit, or, with automatic
  // prefetch, the bytes that reloads were measured to need as a head start.
  std::optional<int> keep_last = std::nullopt;
  // Device bytes that may wait for their copies out. At the bound the compute stream waits, the host does not.
  Bytes max_in_flight{int64_t{256} << 20};
  // Device bytes in use, whoever's they are, above which nothing comes back ahead of its use: room for what backward's
  // operators need themselves. What is held back comes when it is needed, and compute waits. None: no limit.
  std::optional<Bytes> device_limit = std::nullopt;
  // Idle host bytes kept for reuse.
  Bytes host_cache_limit{int64_t{4} << 30};
  // All host bytes. At the limit a storage stays on the device instead, with one warning. None: no limit.
  std::optional<Bytes> host_limit = std::nullopt;
  // Page-locked host memory. Where it cannot be had, pageable memory is taken, with one warning.
  bool pin = true;
  Policy policy = nullptr;
};

// UserError that names the option, its value and the valid range.
void validate(const Options& options);
// What can be said only once the units are known: prefetch and keep_last are below their number.
void validate(const Options& options, int64_t num_units);

// "async", "sync", "off"; "automatic", "2" (layers), "64MiB". Others are UserErrors that name `what`, the option's
// path.
Mode parse_mode(std::string_view text, std::string_view what = "offload.mode");
Prefetch parse_prefetch(std::string_view text, std::string_view what = "offload.prefetch");
std::string to_string(Mode mode);
std::string to_string(const Prefetch& prefetch);

}  // namespace neap::offload
