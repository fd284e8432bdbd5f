// torch-free
// Messages of the library go to standard error, in colour on a terminal.
#pragma once

#include <string>

namespace neap::cli {

// `label` stands before each message: "[rank 1] ".
void log_to_standard_error(const std::string& label);

}  // namespace neap::cli
