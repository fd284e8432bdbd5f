#include "neap/files/file_system.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "neap/base/error.h"

namespace neap::files {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, const char* action, const char* reason) {
  NEAP_USER_ERROR("[files] expected that ", path.string(), " can be ", action, "; the system says: ", reason);
}
[[noreturn]] void fail(const fs::path& path, const char* action) { fail(path, action, std::strerror(errno)); }

}  // namespace

FileSystem& FileSystem::system() {
  static FileSystem instance;
  return instance;
}

void FileSystem::before(std::string_view /*action*/, const fs::path& /*path*/) {}

int FileSystem::create(const fs::path& file) {
  before("create", file);
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) fail(file, "created");
  return descriptor;
}

void FileSystem::write(int descriptor, const fs::path& file, std::span<const std::byte> bytes) {
  before("write", file);
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(file, "written");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void FileSystem::sync(int descriptor, const fs::path& file) {
  before("sync", file);
  if (::fsync(descriptor) != 0) fail(file, "flushed");
}

void FileSystem::close(int descriptor) noexcept { ::close(descriptor); }

void FileSystem::make_directory(const fs::path& directory) {
  before("make_directory", directory);
  std::error_code error, ignored;
  fs::create_directories(directory, error);
  if (!fs::is_directory(directory, ignored)) fail(directory, "made", error.message().c_str());
}

void FileSystem::sync_directory(const fs::path& directory) {
  before("sync_directory", directory);
  const int descriptor = ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

void FileSystem::rename(const fs::path& from, const fs::path& to) {
  before("rename", to);
  if (std::rename(from.c_str(), to.c_str()) != 0) fail(to, "renamed");
}

void FileSystem::exchange(const fs::path& from, const fs::path& to) {
  before("exchange", to);
  if (std::rename(from.c_str(), to.c_str()) == 0) return;
  if (errno != ENOTEMPTY && errno != EEXIST) fail(to, "renamed");
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) fail(to, "replaced");
  const fs::path aside = from.string() + ".old";
  remove(aside);
  if (std::rename(to.c_str(), aside.c_str()) != 0 || std::rename(from.c_str(), to.c_str()) != 0 ||
      std::rename(aside.c_str(), from.c_str()) != 0) {
    fail(to, "replaced");
  }
}

void FileSystem::remove(const fs::path& path) {
  before("remove", path);
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail(path, "removed", error.message().c_str());
}

void FileSystem::remove_quietly(const fs::path& path) noexcept {
  try {
    remove(path);
  } catch (const std::exception&) {  // what is left over is removed by whoever comes next
  }
}

}  // namespace neap::files
