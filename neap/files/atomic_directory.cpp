#include "neap/files/atomic_directory.h"

#include <string>

namespace neap::files {
namespace {

namespace fs = std::filesystem;

// Without a slash at the end, which would leave it without a name.
fs::path normal(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

}  // namespace

fs::path AtomicDirectory::temporary_name(const fs::path& path) {
  const fs::path plain = normal(path);
  return plain.parent_path() / ("." + plain.filename().string() + ".partial");
}

AtomicDirectory::AtomicDirectory(const fs::path& path, FileSystem& system)
    : system_(system), path_(normal(path)), temporary_(temporary_name(path)) {
  system_.remove(temporary_);
  system_.make_directory(temporary_);
}

AtomicDirectory::~AtomicDirectory() {
  if (!done_) system_.remove_quietly(temporary_);
}

void AtomicDirectory::commit() {
  system_.sync_directory(temporary_);
  system_.exchange(temporary_, path_);
  system_.sync_directory(path_.parent_path());
  done_ = true;
  system_.remove_quietly(temporary_);  // what had the name before
}

void remove_whole(const fs::path& directory, FileSystem& system) {
  const fs::path aside = AtomicDirectory::temporary_name(directory);
  system.remove(aside);
  system.rename(directory, aside);
  system.remove(aside);
}

}  // namespace neap::files
