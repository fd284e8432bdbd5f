// torch-free
// What a run that goes on from a checkpoint may change, and what it may not.
#pragma once

#include <string>
#include <string_view>

#include "neap/train/config.h"
#include "neap/train/sequences.h"

namespace neap::train {

// How a run is cut into steps and ranks, where its files lie and what it does with memory may change. The model, the
// order of the data and the optimizer may not; a key that nobody thought of here belongs to these.
bool may_change(std::string_view key);

// UserError naming the first key of `now` that may not differ from the run file `before`, and does. `checkpoint` is the
// file of the latter, for messages.
void check_unchanged(const RunConfig& now, const std::string& before, const std::string& checkpoint);

// The same for equal data, wherever it lies; other data has another one, unless it differs in few places only.
std::string fingerprint(const Sequences& sequences);

}  // namespace neap::train
