// SIGINT and SIGTERM ask the run to stop after its step; a second one ends the process at once.
#pragma once

namespace neap::cli {

void install_stop_signals();

// The signal that came first, or 0.
int stop_signal() noexcept;

}  // namespace neap::cli
