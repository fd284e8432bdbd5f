// torch-free
// Messages of the library go to standard error, in colour on a terminal.
#pragma once

namespace neap::cli {

void log_to_standard_error();

}  // namespace neap::cli
