#include "cli/stop_signal.h"

#include <unistd.h>

#include <atomic>
#include <csignal>

namespace neap::cli {
namespace {

std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free, "set from a signal handler");

void on_signal(int signal) {
  received.store(signal);
  constexpr char kText[] = "\nneap: stopping after this step; once more to stop at once\n";
  // Nothing to do when standard error is closed.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kText, sizeof kText - 1);
}

}  // namespace

void install_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int stop_signal() noexcept { return received.load(); }

}  // namespace neap::cli
