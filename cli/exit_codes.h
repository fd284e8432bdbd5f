// What `neap` returns to its caller. Documented in `neap train --help` and tested in tests/cli.
#pragma once

#include <csignal>

namespace neap::cli {

inline constexpr int kOk = 0;
inline constexpr int kInternalError = 1;  // a bug of ours
inline constexpr int kUserError = 2;      // the command, the run file, the data or the model can be mended
inline constexpr int kOutOfMemory = 3;    // of the device
inline constexpr int kNonFinite = 4;      // train.non_finite is stop, and loss or gradients were not finite
inline constexpr int kRankFailed = 5;     // another rank died, left or did not answer in time

// Stopped by a signal, after the step was finished and everything was written: as shells report it, 130 or 143.
inline constexpr int stopped_by(int signal) { return 128 + signal; }

inline constexpr const char* kExitCodesHelp =
    "0 finished, 1 internal error, 2 mistake in the command or its input, 3 out of device memory, 4 loss or gradients\n"
    "not finite, 5 another rank failed, 130 and 143 stopped by SIGINT and SIGTERM after the step was finished and\n"
    "everything written.";

}  // namespace neap::cli
