// torch-free
// A file that appears whole under its name, or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "neap/files/file_system.h"

namespace neap::files {

// Written beside its place under a temporary name; commit() makes it durable and renames it. Destroyed before that, it
// leaves nothing behind. Every failure of the system is a UserError that names the path. Not thread-safe.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path, FileSystem& system = FileSystem::system());
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  FileSystem& system_;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

void write_text(const std::filesystem::path& path, std::string_view text, FileSystem& system = FileSystem::system());

}  // namespace neap::files
