#include "neap/files/process_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "neap/base/error.h"
#include "neap/base/log.h"

namespace neap::files {
namespace {

// "process 17", where that can still be said: it may have ended meanwhile, or run on another machine.
std::string holder(int descriptor) {
  struct flock asked {};
  asked.l_type = F_WRLCK;
  asked.l_whence = SEEK_SET;
  const bool known = ::fcntl(descriptor, F_GETLK, &asked) == 0 && asked.l_type != F_UNLCK && asked.l_pid > 0;
  return known ? "process " + std::to_string(asked.l_pid) : "another process";
}

}  // namespace

ProcessLock::ProcessLock(const std::filesystem::path& directory, const char* name, const char* key) {
  const std::filesystem::path file = directory / name;
  descriptor_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  NEAP_CHECK(descriptor_ >= 0, "[", key, "] ", file.string(), " cannot be made: ", std::strerror(errno));
  struct flock wanted {};
  wanted.l_type = F_WRLCK;
  wanted.l_whence = SEEK_SET;
  if (::fcntl(descriptor_, F_SETLK, &wanted) == 0) return;
  const int error = errno;
  if (error != EACCES && error != EAGAIN) {
    log_warning("[", key, "] ", file.string(), " cannot be locked (", std::strerror(error),
                "): a second process that writes to that directory would not be noticed");
    return;
  }
  const std::string other = holder(descriptor_);
  ::close(descriptor_);
  NEAP_USER_ERROR("[", key, "] expected a directory that no other process writes to; found that ", other, " holds ",
                  file.string(), "; wait for its end, stop it, or choose another directory");
}

ProcessLock::~ProcessLock() { ::close(descriptor_); }

}  // namespace neap::files
