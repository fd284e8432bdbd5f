// torch-free
// What a run that goes on from a checkpoint may change, and what it may not.
#pragma once

#include <map>
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

// How the entries begin that describe a run's adapters: "lora.alpha", …
inline constexpr std::string_view kAdapterPrefix = "lora.";

// UserError naming what is different about the adapters of a run (Adapters::description()) from those of the checkpoint
// that it goes on from.
void check_same_adapters(const std::map<std::string, std::string>& now,
                         const std::map<std::string, std::string>& before, const LoraSection& lora,
                         const std::string& checkpoint);

// The same for equal data, wherever it lies; other data has another one, unless it differs in few places only.
std::string fingerprint(const Sequences& sequences);

}  // namespace neap::train
