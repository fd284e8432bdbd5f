// torch-free
#include "neap/train/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"

namespace neap::train {
namespace {

// llm.c: 256 int32, of which [0] the magic number, [1] the version, [2] the number of tokens.
constexpr size_t kHeaderBytes = 1024;
struct LlmC {
  int32_t magic;
  int32_t version;
  int width;
};
constexpr LlmC kLlmC[] = {{20240520, 1, 2}, {20240801, 7, 4}};

struct Header {
  int32_t magic = 0;
  int32_t version = 0;
  int32_t tokens = 0;
};

Header read_header(const std::byte* data, size_t bytes) {
  Header header;
  if (bytes >= sizeof header) std::memcpy(&header, data, sizeof header);
  return header;
}

const LlmC* known_llmc(int32_t magic) {
  const auto* found = std::ranges::find(kLlmC, magic, &LlmC::magic);
  return found == std::end(kLlmC) ? nullptr : found;
}

DataFormat resolve(DataFormat format, const std::filesystem::path& path, const Header& header) {
  if (format != DataFormat::kAutomatic) return format;
  if (path.extension() != ".bin") return DataFormat::kText;
  return known_llmc(header.magic) != nullptr ? DataFormat::kLlmC : DataFormat::kNanoGpt;
}

}  // namespace

TokenFile::TokenFile(TokenFile&& other) noexcept { *this = std::move(other); }

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  name_ = std::move(other.name_);
  mapping_ = std::exchange(other.mapping_, nullptr);
  mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
  offset_ = other.offset_;
  width_ = other.width_;
  size_ = std::exchange(other.size_, 0);
  return *this;
}

TokenFile::~TokenFile() { unmap(); }

void TokenFile::unmap() noexcept {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_bytes_);
  mapping_ = nullptr;
}

TokenFile TokenFile::open(const std::filesystem::path& path, DataFormat format, TokenType token_type) {
  TokenFile file;
  file.name_ = path.string();
  const std::string place = "[data.path] " + file.name_ + ": ";
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  NEAP_CHECK(descriptor >= 0, place, "cannot be opened: ", std::strerror(errno));
  const ScopeExit close([descriptor] { ::close(descriptor); });
  struct stat status {};
  NEAP_CHECK(::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode), place, "expected a file");
  NEAP_CHECK(status.st_size > 0, place, "the file is empty");

  file.mapped_bytes_ = static_cast<size_t>(status.st_size);
  void* mapping = ::mmap(nullptr, file.mapped_bytes_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  NEAP_CHECK(mapping != MAP_FAILED, place, "cannot be mapped: ", std::strerror(errno));
  file.mapping_ = mapping;

  const Header header = read_header(static_cast<const std::byte*>(mapping), file.mapped_bytes_);
  switch (resolve(format, path, header)) {
    case DataFormat::kText:
      file.width_ = 1;
      break;
    case DataFormat::kLlmC: {
      const LlmC* known = known_llmc(header.magic);
      NEAP_CHECK(file.mapped_bytes_ >= kHeaderBytes && known != nullptr && header.version == known->version, place,
                 "expected llm.c's header (magic 20240520 version 1, or magic 20240801 version 7); found magic ",
                 header.magic, " version ", header.version);
      file.width_ = known->width;
      file.offset_ = kHeaderBytes;
      break;
    }
    default:
      file.width_ = token_type == TokenType::kUint16 ? 2 : 4;
      break;
  }
  const size_t payload = file.mapped_bytes_ - file.offset_;
  const auto width = static_cast<size_t>(file.width_);
  NEAP_CHECK(payload % width == 0, place, "truncated: ", payload, " bytes are not a whole number of ", width,
             "-byte tokens");
  file.size_ = static_cast<int64_t>(payload / width);
  NEAP_CHECK(file.offset_ == 0 || file.size_ == header.tokens, place,
             file.size_ < header.tokens ? "truncated" : "longer than it says", ": the header promises ", header.tokens,
             " tokens, the file holds ", file.size_);
  return file;
}

// Calls function(pointer to the tokens in their own type). The header's length keeps the tokens aligned.
template <class Function>
auto TokenFile::visit(Function&& function) const {
  const std::byte* tokens = static_cast<const std::byte*>(mapping_) + offset_;
  switch (width_) {
    case 1:
      return function(reinterpret_cast<const uint8_t*>(tokens));
    case 2:
      return function(reinterpret_cast<const uint16_t*>(tokens));
    default:
      return function(reinterpret_cast<const uint32_t*>(tokens));
  }
}

void TokenFile::read(int64_t begin, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  NEAP_ASSERT(begin >= 0 && begin + count <= size_, "tokens ", begin, " + ", count, " of ", size_);
  visit([&](const auto* tokens) { std::copy_n(tokens + begin, count, out.begin()); });
}

void TokenFile::check_vocabulary(int64_t vocabulary) const {
  visit([&](const auto* tokens) {
    const auto* end = tokens + size_;
    const auto* bad = std::find_if(tokens, end, [&](auto token) { return static_cast<int64_t>(token) >= vocabulary; });
    NEAP_CHECK(bad == end, "[data.path] ", name_, ": expected tokens below the model's vocabulary of ", vocabulary,
               "; found ", static_cast<int64_t>(*bad), " at position ", bad - tokens,
               "; tokenise with the model's own tokenizer, and check data.token_type");
  });
}

}  // namespace neap::train
