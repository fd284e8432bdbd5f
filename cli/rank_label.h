// Which of several ranks a message comes from.
#pragma once

#include <string>

namespace neap::cli {

// "[rank 1] ", or nothing when this process is the only one or its launcher's variables make no sense.
std::string rank_label();

}  // namespace neap::cli
