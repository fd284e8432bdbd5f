// torch-free
#include "neap/train/resumption.h"

#include <algorithm>
#include <array>
#include <span>
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
