// torch-free
#include "neap/train/token_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "neap/base/error.h"
#include "neap/train/megatron_index.h"
#include "neap/train/token_type.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;

// llm.c: 256 int32, of which [0] the magic number, [1] the version, [2] the number of tokens.
constexpr size_t kHeaderBytes = 1024;
struct LlmC {
  int32_t magic;
  int32_t version;
  TokenType type;
};
constexpr LlmC kLlmC[] = {{20240520, 1, TokenType::kUint16}, {20240801, 7, TokenType::kUint32}};

// Tokens looked at between two releases of their pages.
constexpr int64_t kCheckedAtOnce = int64_t{1} << 20;

struct Header {
  int32_t magic = 0;
  int32_t version = 0;
  int32_t tokens = 0;
};

Header read_header(std::span<const std::byte> bytes) {
  Header header;
  if (bytes.size() >= sizeof header) std::memcpy(&header, bytes.data(), sizeof header);
  return header;
}

const LlmC* known_llmc(int32_t magic) {
  const auto* found = std::ranges::find(kLlmC, magic, &LlmC::magic);
  return found == std::end(kLlmC) ? nullptr : found;
}

bool is_file(const fs::path& path) {
  std::error_code status;
  return fs::is_regular_file(path, status);
}

// What the names alone say; kAutomatic where the header has to be asked.
DataFormat resolve(DataFormat format, const fs::path& path) {
  if (format != DataFormat::kAutomatic) return format;
  if (path.extension() == ".idx") return DataFormat::kMegatron;
  const auto [bin, idx] = megatron_paths(path);
  if (is_file(idx) && is_file(bin) && (path == bin || !is_file(path))) return DataFormat::kMegatron;
  return path.extension() == ".bin" ? DataFormat::kAutomatic : DataFormat::kText;
}

}  // namespace

TokenFile TokenFile::open(const fs::path& path, DataFormat format, TokenType token_type) {
  format = resolve(format, path);
  const MegatronPaths megatron = megatron_paths(path);
  const fs::path& name = format == DataFormat::kMegatron ? megatron.bin : path;
  const std::string place = "[data.path] " + name.string() + ": ";
  TokenFile file(name.string(), MappedFile(name, place));
  file.file_.read_as_announced();
  const size_t bytes = file.file_.size();
  NEAP_CHECK(bytes > 0, place, "the file is empty");

  const Header header = read_header(file.file_.bytes());
  const LlmC* known = known_llmc(header.magic);
  if (format == DataFormat::kAutomatic) format = known != nullptr ? DataFormat::kLlmC : DataFormat::kNanoGpt;
  if (format == DataFormat::kMegatron) {
    const MegatronIndex index = read_megatron_index(megatron, static_cast<int64_t>(bytes));
    file.type_ = index.type;
  } else if (format == DataFormat::kLlmC) {
    NEAP_CHECK(bytes >= kHeaderBytes, place, "truncated: llm.c's header alone has ", kHeaderBytes,
               " bytes, the file has ", bytes);
    NEAP_CHECK(known != nullptr && header.version == known->version, place,
               "expected llm.c's header (magic 20240520 version 1, or magic 20240801 version 7); found magic ",
               header.magic, " version ", header.version);
    file.type_ = known->type;
    file.offset_ = kHeaderBytes;
  } else if (format == DataFormat::kNanoGpt) {
    file.type_ = token_type;
  }
  const size_t payload = bytes - file.offset_;
  const auto width = static_cast<size_t>(size_of(file.type_));
  NEAP_CHECK(payload % width == 0, place, "truncated: ", payload, " bytes are not a whole number of ", width,
             "-byte tokens");
  file.size_ = static_cast<int64_t>(payload / width);
  NEAP_CHECK(file.offset_ == 0 || file.size_ == header.tokens, place,
             file.size_ < header.tokens ? "truncated" : "longer than it says", ": the header promises ", header.tokens,
             " tokens, the file holds ", file.size_);
  return file;
}

// The mapping begins with a page and the header's length is a multiple of every type, so the tokens are aligned.
template <class Function>
decltype(auto) TokenFile::visit(Function&& function) const {
  return visit_tokens(type_, file_.bytes().data() + offset_, std::forward<Function>(function));
}

void TokenFile::announce(int64_t begin, int64_t count) const noexcept {
  const auto width = static_cast<size_t>(size_of(type_));
  file_.announce(offset_ + static_cast<size_t>(begin) * width, static_cast<size_t>(count) * width);
}

void TokenFile::release(int64_t begin, int64_t count) const noexcept {
  const auto width = static_cast<size_t>(size_of(type_));
  file_.release(offset_ + static_cast<size_t>(begin) * width, static_cast<size_t>(count) * width);
}

void TokenFile::read(int64_t begin, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  NEAP_ASSERT(begin >= 0 && begin <= size_ - count, "tokens ", begin, " + ", count, " of ", size_);
  file_.check_length();
  announce(begin, count);
  visit([&](const auto* tokens) { std::copy_n(tokens + begin, count, out.begin()); });
  release(begin, count);
}

template <class Function>
void TokenFile::scan(Function&& function) const {
  visit([&](const auto* tokens) {
    announce(0, kCheckedAtOnce);
    bool wanted = true;
    for (int64_t begin = 0; begin < size_ && wanted; begin += kCheckedAtOnce) {
      const int64_t end = std::min(size_, begin + kCheckedAtOnce);
      announce(end, kCheckedAtOnce);  // the next piece, under the work on this one
      wanted = function(tokens, begin, end);
      release(begin, end - begin);
    }
  });
}

bool TokenFile::contains(int64_t token) const {
  bool found = false;
  scan([&](const auto* tokens, int64_t begin, int64_t end) {
    const auto is_it = [token](auto other) { return static_cast<int64_t>(other) == token; };
    found = std::find_if(tokens + begin, tokens + end, is_it) != tokens + end;
    return !found;
  });
  return found;
}

void TokenFile::check_vocabulary(int64_t vocabulary) const {
  scan([&](const auto* tokens, int64_t begin, int64_t end) {
    const auto bad = [&](auto token) {
      const auto value = static_cast<int64_t>(token);
      return value < 0 || value >= vocabulary;
    };
    // Without a way out of the loop it runs as vectors; where the culprit is matters only when there is one.
    bool any = false;
    for (int64_t i = begin; i < end; ++i) any |= bad(tokens[i]);
    const int64_t at = any ? std::find_if(tokens + begin, tokens + end, bad) - tokens : 0;
    NEAP_CHECK(!any, "[data.path] ", name_, ": expected tokens below the model's vocabulary of ", vocabulary,
               "; found ", static_cast<int64_t>(tokens[at]), " at position ", at,
               "; tokenise with the model's own tokenizer, and check data.token_type");
    return true;
  });
}

}  // namespace neap::train
