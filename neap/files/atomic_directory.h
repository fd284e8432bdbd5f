// torch-free
// A directory that appears whole under its name, or not at all.
#pragma once

#include <filesystem>

#include "neap/files/file_system.h"

namespace neap::files {

// Filled under a temporary name beside its place, which others may write to as well; commit() gives it its name, once
// every file in it is durable. A directory that had the name is replaced. Destroyed before that, it leaves nothing
// behind; a process that dies leaves the temporary one, which the next of the same name empties. Not thread-safe.
class AtomicDirectory {
 public:
  explicit AtomicDirectory(const std::filesystem::path& path, FileSystem& system = FileSystem::system());
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  // ".NAME.partial"
  static std::filesystem::path temporary_name(const std::filesystem::path& path);
  const std::filesystem::path& temporary() const noexcept { return temporary_; }

  void commit();

 private:
  FileSystem& system_;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  bool done_ = false;
};

// Takes the name away first, so that no half of it is ever found under it.
void remove_whole(const std::filesystem::path& directory, FileSystem& system = FileSystem::system());

}  // namespace neap::files
