// torch-free
// Which tokens each sequence of a run holds: the file cut into sequences of one length, one document running on into
// the next, in an order that depends on nothing but (seed, epoch).
//
// A run's place in its data is one number, the position: how many sequences all ranks together have taken. Any position
// is found at once, without the ones before it, so a run goes on where another one stopped, also on more or fewer
// ranks. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "neap/train/permutation.h"
#include "neap/train/token_file.h"

namespace neap::train {

// The loss passes over such a label.
inline constexpr int64_t kIgnoredLabel = -100;

class Sequences {
 public:
  struct Options {
    int64_t length = 512;
    bool shuffle = true;
    uint64_t seed = 0;
    // The last token of a document: what follows it is not learned, its label is kIgnoredLabel.
    std::optional<int64_t> end_token = std::nullopt;
  };

  // Throws UserError when the file is shorter than one sequence and its last label. The file must outlive this.
  Sequences(const TokenFile& file, Options options);

  int64_t length() const noexcept { return options_.length; }
  int64_t per_epoch() const noexcept { return per_epoch_; }

  // Some labels may be ignored.
  bool leaves_out() const noexcept { return options_.end_token.has_value(); }
  // How many labels of `count` sequences from `position` on are learned. Reads their tokens where some may not be.
  int64_t learned(int64_t position, int64_t count) const;

  // Fills `inputs` and `labels` with the sequences `position`, `position` + 1, … of the run, which go on through epoch
  // after epoch: as many as fit. Each has options.length tokens; labels are the inputs one token later, but for those
  // of options.end_token. REQUIRES: both of one size, a multiple of that.
  void read(int64_t position, std::span<int64_t> inputs, std::span<int64_t> labels) const;

 private:
  int64_t first_token(int64_t position) const;

  const TokenFile& file_;
  Options options_;
  int64_t per_epoch_;
};

}  // namespace neap::train
