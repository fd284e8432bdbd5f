// torch-free
// The calls of the operating system that make files durable, and a seam in front of each of them.
//
// Every failure is a UserError that names the path and what the system says. Thread-safe, if before() is.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace neap::files {

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  static FileSystem& system();

  [[nodiscard]] int create(const std::filesystem::path& file);  // a descriptor for writing; an old file is emptied
  void write(int descriptor, const std::filesystem::path& file, std::span<const std::byte> bytes);
  void sync(int descriptor, const std::filesystem::path& file);
  static void close(int descriptor) noexcept;

  void make_directory(const std::filesystem::path& directory);  // and its parents; may be there
  // A file system that cannot flush directories is let be.
  void sync_directory(const std::filesystem::path& directory);
  // Replaces a file of that name.
  void rename(const std::filesystem::path& from, const std::filesystem::path& to);
  // The same for directories. One that has the name already is kept under the other, at the same instant where the
  // system can do that.
  void exchange(const std::filesystem::path& from, const std::filesystem::path& to);
  void remove(const std::filesystem::path& path);  // a directory with all in it; nothing there is fine
  void remove_quietly(const std::filesystem::path& path) noexcept;

 protected:
  // Called before each call above with its name; an exception stands for a failure of it.
  virtual void before(std::string_view action, const std::filesystem::path& path);
};

}  // namespace neap::files
