// torch-free
#include "neap/train/sequences.h"

#include <algorithm>
#include <vector>

#include "neap/base/error.h"

namespace neap::train {

Sequences::Sequences(const TokenFile& file, Options options) : file_(file), options_(options) {
  // One token more than the inputs, because the last input needs a label.
  per_epoch_ = (file.size() - 1) / options.length;
  NEAP_CHECK(per_epoch_ >= 1, "[train.sequence] ", file.name(), " holds ", file.size(), " tokens; one sequence of ",
             options.length, " needs ", options.length + 1);
}

int64_t Sequences::first_token(int64_t position) const {
  const int64_t epoch = position / per_epoch_;
  const int64_t place = position % per_epoch_;
  if (!options_.shuffle) return place * options_.length;
  return Permutation(per_epoch_, options_.seed, static_cast<uint64_t>(epoch))(place) * options_.length;
}

void Sequences::read(int64_t position, std::span<int64_t> inputs, std::span<int64_t> labels) const {
  const auto length = static_cast<size_t>(options_.length);
  NEAP_ASSERT(inputs.size() == labels.size() && inputs.size() % length == 0, inputs.size(), " and ", labels.size(),
              " tokens of sequences of ", length);
  for (size_t begin = 0; begin < inputs.size(); begin += length, ++position) {
    const int64_t first = first_token(position);
    const std::span<int64_t> own = inputs.subspan(begin, length);
    file_.read(first, own);
    std::ranges::copy(own.subspan(1), labels.begin() + static_cast<std::ptrdiff_t>(begin));
    file_.read(first + options_.length, labels.subspan(begin + length - 1, 1));
  }
  if (!options_.end_token) return;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] == *options_.end_token) labels[i] = kIgnoredLabel;
  }
}

int64_t Sequences::learned(int64_t position, int64_t count) const {
  const int64_t all = count * options_.length;
  if (!options_.end_token) return all;
  std::vector<int64_t> tokens(static_cast<size_t>(options_.length));
  int64_t ends = 0;
  for (int64_t i = 0; i < count; ++i) {
    file_.read(first_token(position + i), tokens);
    ends += std::ranges::count(tokens, *options_.end_token);
  }
  return all - ends;
}

}  // namespace neap::train
