// torch-free
// A file that appears whole under its name, or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace neap::models::internal {

// Written beside its place under a temporary name; commit() makes it durable and renames it. Destroyed before that, it
// leaves nothing behind. Every failure of the system is a UserError that names the path. Not thread-safe.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* action) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

}  // namespace neap::models::internal
