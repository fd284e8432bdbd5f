// torch-free
#include "neap/base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "neap/base/error.h"

namespace neap {
namespace {

// A fault maps what the system has of the aligned 64 KiB around it (fault-around), so that much has to be let go.
constexpr size_t kFaultWindow = 65536;

}  // namespace

// The object is whole once the constructor it delegates to is done: from there on its destructor cleans up after
// errors.
MappedFile::MappedFile(const std::filesystem::path& path, std::string place) : MappedFile(std::move(place)) {
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  NEAP_CHECK(descriptor_ >= 0, place_, "cannot be opened: ", std::strerror(errno));
  struct stat status {};
  NEAP_CHECK(::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode), place_,
             "expected a file; found something else, such as a directory");
  if (status.st_size == 0) return;
  void* mapped = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor_, 0);
  NEAP_CHECK(mapped != MAP_FAILED, place_, "cannot be mapped: ", std::strerror(errno));
  data_ = static_cast<const std::byte*>(mapped);
  size_ = static_cast<size_t>(status.st_size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  place_ = std::move(other.place_);
  descriptor_ = std::exchange(other.descriptor_, -1);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() noexcept {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  if (descriptor_ >= 0) ::close(descriptor_);
  data_ = nullptr;
  descriptor_ = -1;
}

void MappedFile::read_as_announced() const noexcept {
  if (data_ != nullptr) ::madvise(const_cast<std::byte*>(data_), size_, MADV_RANDOM);
}

void MappedFile::announce(size_t begin, size_t count) const noexcept {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto base = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t first = (base + std::min(begin, size_)) / page * page;
  const uintptr_t last = base + std::min(size_, begin + count);
  if (data_ != nullptr && first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_WILLNEED);
}

void MappedFile::release(size_t begin, size_t count) const noexcept {
  const auto base = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t first = std::max(base, (base + begin) / kFaultWindow * kFaultWindow);
  const uintptr_t last =
      std::min(base + size_, (base + begin + count + kFaultWindow - 1) / kFaultWindow * kFaultWindow);
  // Only an advice: where it fails, the pages stay until the system wants them back.
  if (data_ != nullptr && first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

void MappedFile::read(size_t begin, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(begin));
    if (count < 0 && errno == EINTR) continue;
    NEAP_CHECK(count >= 0, place_, "cannot be read: ", std::strerror(errno));
    NEAP_CHECK(count > 0, place_, "has become shorter while it was read: it ends at byte ", begin);
    out = out.subspan(static_cast<size_t>(count));
    begin += static_cast<size_t>(count);
  }
}

void MappedFile::check_length() const {
  struct stat status {};
  const bool known = ::fstat(descriptor_, &status) == 0;
  NEAP_CHECK(known && static_cast<size_t>(status.st_size) >= size_, place_, "the file had ", size_,
             " bytes when it was opened and has ", known ? static_cast<int64_t>(status.st_size) : int64_t{-1},
             " now; it must not be changed while it is used");
}

}  // namespace neap
