// `neap checkpoint verify DIR` and `neap checkpoint convert DIR OUT`.
#pragma once

#include <string>

namespace neap::cli {

// Reads a checkpoint, or each one of a directory, as a whole and says what it is. The exit code.
int verify_checkpoint(const std::string& dir);

// Writes the model of a checkpoint, or of the newest one of a directory, as a Hugging Face directory. The exit code.
int convert_checkpoint(const std::string& dir, const std::string& out);

}  // namespace neap::cli
