#include "cli/inspect_command.h"

#include <iostream>

#include "cli/exit_codes.h"
#include "neap/models/inspect.h"

namespace neap::cli {

int inspect(const std::string& directory) {
  std::cout << models::to_text(models::inspect_hf(directory));
  return kOk;
}

}  // namespace neap::cli
