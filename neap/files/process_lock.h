// torch-free
// A directory that one process at a time writes to.
#pragma once

#include <filesystem>

namespace neap::files {

// An advisory lock on the file `name` in a directory, which stays there, empty. The system gives it back when the
// process ends, also by SIGKILL; neither forked children nor programs that it starts hold it (POSIX record locks, which
// belong to the process: fcntl(2)). Of two in one process both hold it. Where the file system knows no locks, a warning
// is all there is. Not thread-safe.
class ProcessLock {
 public:
  // UserError that begins with `[key]` when another process holds the lock, or the file cannot be made.
  ProcessLock(const std::filesystem::path& directory, const char* name, const char* key);
  ~ProcessLock();
  ProcessLock(const ProcessLock&) = delete;
  ProcessLock& operator=(const ProcessLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace neap::files
