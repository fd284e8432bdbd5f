// torch-free
#include "neap/train/sequences.h"

#include <algorithm>

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
}

}  // namespace neap::train
