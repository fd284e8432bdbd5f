#include "cli/overrides.h"

#include "neap/base/error.h"

namespace neap::cli {

CommandLine split_command_line(int argc, const char* const* argv) {
  CommandLine out;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    if (!name.starts_with("--") || name.find('.') == std::string::npos) {
      out.arguments.push_back(argument);
      continue;
    }
    const std::string path = name.substr(2);
    if (equals != std::string::npos) {
      out.overrides.emplace_back(path, argument.substr(equals + 1));
    } else {
      NEAP_CHECK(i + 1 < argc, "[", name, "] expected a value: ", name, "=VALUE");
      out.overrides.emplace_back(path, argv[++i]);
    }
  }
  return out;
}

}  // namespace neap::cli
