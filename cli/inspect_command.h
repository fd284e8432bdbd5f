// `neap inspect DIR`: what a model directory holds.
#pragma once

#include <string>

namespace neap::cli {

// Prints to standard output and returns the exit code. Throws UserError on directories that no model can be read from.
int inspect(const std::string& directory);

}  // namespace neap::cli
