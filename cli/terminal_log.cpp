// torch-free
#include "cli/terminal_log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "neap/base/log.h"

namespace neap::cli {

void log_to_standard_error(const std::string& label) {
  const auto logger = spdlog::stderr_color_mt("neap");
  logger->set_pattern("neap: " + label + "%^%l%$: %v");
  set_log_sink([logger](LogLevel level, const std::string& text) {
    switch (level) {
      case LogLevel::kDebug:
        return logger->debug(text);
      case LogLevel::kInfo:
        return logger->info(text);
      case LogLevel::kWarning:
        return logger->warn(text);
      case LogLevel::kError:
        break;
    }
    logger->error(text);
  });
}

}  // namespace neap::cli
