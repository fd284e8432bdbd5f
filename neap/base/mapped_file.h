// torch-free
// A regular file, mapped for reading.
//
// Pages are read when they are touched, and release() lets them go again, so that the memory of a process that reads
// through a large file stays constant; they remain in the system's cache. Movable only. Reading is thread-safe.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

namespace neap {

class MappedFile {
 public:
  // `place` begins every message: "[data.path] corpus.bin: ". UserError for what is missing, cannot be read, or is no
  // regular file. An empty file has no bytes.
  MappedFile(const std::filesystem::path& path, std::string place);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  size_t size() const noexcept { return size_; }

  // From now on the system reads what announce() names, and single pages when others are touched: for bytes that are
  // wanted here and there, around which it would read megabytes. Advice, as the next two are.
  void read_as_announced() const noexcept;
  // These bytes will be touched soon. Does not wait for them.
  void announce(size_t begin, size_t count) const noexcept;
  // The pages of these bytes leave the process. They come back when they are touched again.
  void release(size_t begin, size_t count) const noexcept;

  // Copies bytes from `begin` on with calls of the system, which is faster than touching each page of the mapping.
  // UserError when the file has become shorter.
  void read(size_t begin, std::span<std::byte> out) const;

  // UserError when somebody has made the file shorter: touching what is gone would end the process.
  void check_length() const;

 private:
  explicit MappedFile(std::string place) : place_(std::move(place)) {}
  void unmap() noexcept;

  std::string place_;
  int descriptor_ = -1;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace neap
