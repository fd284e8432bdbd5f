// train.deterministic: operators that compute the same bits each time, or none.
//
// PyTorch has this as a setting of the process, and so it is here: it holds for every later operator of every thread.
// Operators that have a second, deterministic implementation take it; what one does that has none is chosen here.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "neap/train/config.h"

namespace neap::train {

// kOff leaves the process as it is: a program may have chosen for itself.
void set_deterministic(Deterministic choice);

// The process is so set, by whomever.
bool operators_are_deterministic();

// What to tell the user of an error that is an operator's without a deterministic implementation; empty for others.
std::optional<std::string> nondeterministic_text(const std::exception& error);

}  // namespace neap::train
