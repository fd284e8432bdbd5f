#include "cli/rank_label.h"

#include "neap/base/error.h"
#include "neap/comm/launch.h"

namespace neap::cli {

std::string rank_label() {
  try {
    const comm::Launch launch = comm::Launch::from_environment();
    return launch.world > 1 ? "[rank " + std::to_string(launch.rank) + "] " : "";
  } catch (const UserError&) {
    return "";  // whoever needs the variables says what is wrong with them
  }
}

}  // namespace neap::cli
