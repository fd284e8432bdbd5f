#include "neap/files/atomic_file.h"

#include <unistd.h>

#include <string>
#include <utility>

namespace neap::files {

AtomicFile::AtomicFile(std::filesystem::path path, FileSystem& system)
    : system_(system),
      path_(std::move(path)),
      temporary_(path_.string() + ".tmp." + std::to_string(::getpid())),
      descriptor_(system_.create(temporary_)) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  FileSystem::close(descriptor_);
  system_.remove_quietly(temporary_);
}

void AtomicFile::write(std::span<const std::byte> bytes) { system_.write(descriptor_, temporary_, bytes); }

void AtomicFile::commit() {
  system_.sync(descriptor_, temporary_);
  system_.rename(temporary_, path_);
  FileSystem::close(std::exchange(descriptor_, -1));
  // The rename itself is durable once its directory is.
  system_.sync_directory(path_.parent_path());
}

void write_text(const std::filesystem::path& path, std::string_view text, FileSystem& system) {
  AtomicFile file(path, system);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace neap::files
