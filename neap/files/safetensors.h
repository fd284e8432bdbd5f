// torch-free
// Reading and writing of safetensors files: 8 bytes of header length, a JSON header, and the tensors' bytes.
//
// A file is checked whole when it is opened: the header against itself and against the size of the file. Whatever is
// wrong is a UserError that names the path. Reading maps the file, so tensors are read from disk when they are touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "neap/base/mapped_file.h"
#include "neap/files/atomic_file.h"

namespace neap::files {

enum class SafeType { kBool, kU8, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64 };

std::string_view name_of(SafeType type);  // "BF16", as in the header
int64_t size_of(SafeType type);
std::optional<SafeType> type_named(std::string_view name);

struct SafeTensorInfo {
  std::string name;
  SafeType type = SafeType::kF32;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// Immutable after construction; thread-safe. A file must not be truncated while it is mapped.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const std::vector<SafeTensorInfo>& tensors() const { return tensors_; }  // in the order of their bytes
  // `index` into tensors(). Valid as long as the file object; not necessarily aligned to the type.
  std::span<const std::byte> bytes(std::size_t index) const;
  // Copies the bytes of a tensor, as MappedFile::read() does. REQUIRES: out has the tensor's size.
  void read(std::size_t index, std::span<std::byte> out) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  void parse_header();
  [[noreturn]] void fail(const std::string& what) const;

  std::filesystem::path path_;
  MappedFile file_;
  int64_t body_ = 0;  // offset of the first tensor
  std::vector<SafeTensorInfo> tensors_;
  std::vector<int64_t> offsets_;
  std::map<std::string, std::string> metadata_;
};

// Writes tensors one after the other, so that only one needs to be in host memory. The file appears at finish().
class SafetensorsWriter {
 public:
  // `tensors` in the order in which append() will bring their bytes; `bytes` is computed here.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<SafeTensorInfo>& tensors,
                    const std::map<std::string, std::string>& metadata = {}, FileSystem& system = FileSystem::system());
  void append(std::span<const std::byte> bytes);
  void finish();

 private:
  AtomicFile file_;
  std::vector<int64_t> sizes_;
  std::size_t next_ = 0;
};

}  // namespace neap::files
