// torch-free
#include "neap/train/resumption.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <span>
#include <sstream>
#include <vector>

#include "neap/base/error.h"
#include "neap/files/checksum.h"
#include "neap/train/schema.h"
#include "neap/train/yaml_config.h"

namespace neap::train {

bool may_change(std::string_view key) {
  // A gradient that is a sum instead of a mean, or added up in another precision, is another run.
  constexpr std::array<std::string_view, 3> kNumbers = {"parallel.reduce_op", "parallel.reduce_dtype",
                                                        "parallel.output_dtype"};
  if (std::ranges::find(kNumbers, key) != kNumbers.end()) return false;
  constexpr std::array<std::string_view, 6> kSections = {"device.",   "offload.",    "recompute.",
                                                         "parallel.", "checkpoint.", "log."};
  // The model, the adapters and the data are compared by what they are, not by where they lie.
  constexpr std::array<std::string_view, 13> kKeys = {
      "lora.adapter",     "model.path",       "model.init",         "data.path",   "data.eval",
      "train.steps",      "train.tokens",     "train.global_batch", "train.batch", "train.accumulation",
      "train.non_finite", "train.eval_every", "train.eval_batches"};
  return std::ranges::find(kKeys, key) != kKeys.end() ||
         std::ranges::any_of(kSections, [&](std::string_view section) { return key.starts_with(section); });
}

void check_unchanged(const RunConfig& now, const std::string& before, const std::string& checkpoint) {
  const RunConfig then = parse_config(before, checkpoint, {});
  for (const Key& key : keys()) {
    if (may_change(key.path)) continue;
    NEAP_CHECK(key.show(now) == key.show(then), "[", key.path, "] expected ", key.show(then), ", with which ",
               checkpoint, " was made; found ", key.show(now),
               "; a resumed run goes on with what it began with, checkpoint.resume: none begins another one");
  }
}

namespace {

constexpr const char* kModules = "lora.modules";

// "expected A, found B", of lists of names that may be long: a name that only one of them has.
std::string difference_of_lists(const std::string& before, const std::string& now) {
  const auto names_of = [](const std::string& text) {
    std::istringstream in(text);
    return std::set<std::string>{std::istream_iterator<std::string>(in), {}};
  };
  const std::set<std::string> old_names = names_of(before), new_names = names_of(now);
  for (const std::string& name : old_names) {
    if (!new_names.contains(name)) return neap::internal::concat("expected ", name, " among them");
  }
  for (const std::string& name : new_names) {
    if (!old_names.contains(name)) return neap::internal::concat("expected no ", name, " among them");
  }
  NEAP_ASSERT(false, "lists of adapted modules that have the same names");
}

}  // namespace

void check_same_adapters(const std::map<std::string, std::string>& now,
                         const std::map<std::string, std::string>& before, const LoraSection& lora,
                         const std::string& checkpoint) {
  const auto value = [](const std::map<std::string, std::string>& entries, const std::string& key) {
    const auto found = entries.find(key);
    return found == entries.end() ? std::string("none") : found->second;
  };
  std::set<std::string> keys;
  for (const auto* entries : {&now, &before}) {
    for (const auto& [key, text] : *entries) {
      if (key.starts_with(kAdapterPrefix)) keys.insert(key);
    }
  }
  for (const std::string& key : keys) {
    const std::string then = value(before, key), here = value(now, key);
    if (then == here) continue;
    const bool lists = key == kModules && then != "none" && here != "none";
    NEAP_USER_ERROR("[", key, "] ", lists ? difference_of_lists(then, here) : neap::internal::concat("expected ", then),
                    ", with which ", checkpoint, " was made; found ", lists ? "otherwise" : here,
                    lora.adapter.empty() ? "" : neap::internal::concat(" (lora.adapter: ", lora.adapter, ")"),
                    "; a resumed run goes on with the adapters that it began with");
  }
}

std::string fingerprint(const Sequences& sequences) {
  constexpr int64_t kSamples = 16;
  std::vector<int64_t> tokens(static_cast<size_t>(sequences.length())), labels(tokens.size());
  files::Checksum checksum;
  const int64_t count = sequences.per_epoch();
  checksum.update(std::as_bytes(std::span(&count, 1)));
  for (int64_t sample = 0; sample < std::min(kSamples, count); ++sample) {
    sequences.read(sample * (count / std::min(kSamples, count)), tokens, labels);
    checksum.update(std::as_bytes(std::span<const int64_t>(tokens)));
  }
  return files::checksum_text(checksum.value());
}

}  // namespace neap::train
