// torch-free
#include "neap/train/megatron_index.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "neap/base/error.h"
#include "neap/base/mapped_file.h"
#include "neap/train/token_type.h"

namespace neap::train {
namespace {

using namespace std::literals;

constexpr std::string_view kMagic = "MMIDIDX\0\0"sv;
constexpr size_t kHeaderBytes = 34;
constexpr size_t kReleased = size_t{1} << 20;  // entries that are read before their pages are let go

std::optional<TokenType> type_of_code(uint8_t code) {
  switch (code) {
    case 1:
      return TokenType::kUint8;
    case 2:
      return TokenType::kInt8;
    case 3:
      return TokenType::kInt16;
    case 4:
      return TokenType::kInt32;
    case 5:
      return TokenType::kInt64;
    case 8:
      return TokenType::kUint16;
    default:  // 6 and 7 are floating point
      return std::nullopt;
  }
}

// The three arrays follow a header of 34 bytes, so nothing is aligned.
template <class T>
T load(const MappedFile& file, size_t offset) {
  T value;
  std::memcpy(&value, file.bytes().data() + offset, sizeof value);
  return value;
}

// Calls function(i, entry i) over an array of the file.
template <class T, class Function>
void for_each(const MappedFile& file, size_t offset, uint64_t count, Function&& function) {
  for (uint64_t i = 0; i < count; ++i) {
    if (i % kReleased == 0 && i > 0) file.release(offset + (i - kReleased) * sizeof(T), kReleased * sizeof(T));
    function(i, load<T>(file, offset + i * sizeof(T)));
  }
}

class Reader {
 public:
  Reader(const MegatronPaths& paths, int64_t bin_bytes)
      : bin_(paths.bin.string()),
        place_("[data.path] " + paths.idx.string() + ": "),
        bin_bytes_(bin_bytes),
        file_(paths.idx, place_) {}

  MegatronIndex read() {
    read_header();
    check_sizes();
    read_sequences();
    read_documents();
    return {.type = type_,
            .sequences = static_cast<int64_t>(sequences_),
            .documents = static_cast<int64_t>(entries_) - 1,
            .tokens = tokens_};
  }

 private:
  void read_header() {
    const std::string_view text(reinterpret_cast<const char*>(file_.bytes().data()), file_.size());
    NEAP_CHECK(text.starts_with(kMagic), place_,
               "expected the index of a Megatron token file, which begins with MMIDIDX; found something else. Where ",
               bin_, " needs no index, say so with data.format");
    NEAP_CHECK(text.size() >= kHeaderBytes, place_, "truncated: a header takes ", kHeaderBytes, " bytes, the file has ",
               text.size());
    const auto version = load<uint64_t>(file_, 9);
    NEAP_CHECK(version == 1, place_, "expected version 1; found ", version);
    const auto code = load<uint8_t>(file_, 17);
    const auto type = type_of_code(code);
    NEAP_CHECK(type, place_,
               "expected a type of tokens: 1 (uint8), 2 (int8), 3 (int16), 4 (int32), 5 (int64) or 8 (uint16); found ",
               int{code});
    type_ = *type;
    sequences_ = load<uint64_t>(file_, 18);
    entries_ = load<uint64_t>(file_, 26);
  }

  // Division, not multiplication: counts that a broken header makes up must not overflow.
  void check_sizes() const {
    const uint64_t room = file_.size() - kHeaderBytes;
    NEAP_CHECK(sequences_ <= room / 12 && entries_ <= (room - 12 * sequences_) / 8, place_,
               "truncated: the header promises ", sequences_, " sequences (12 bytes each) and ", entries_,
               " document entries (8 bytes each); after it the file holds ", room, " bytes");
    const uint64_t more = room - 12 * sequences_ - 8 * entries_;
    NEAP_CHECK(more != sequences_ || more == 0, place_,
               "expected a file of text tokens; found one with modes, which is multimodal");
    NEAP_CHECK(more == 0, place_, "longer than it says: ", more, " bytes follow the last entry");
  }

  void read_sequences() {
    const int64_t width = size_of(type_);
    const size_t pointers = kHeaderBytes + 4 * sequences_;
    int64_t next = 0;  // where the next sequence has to begin, in bytes
    for_each<int32_t>(file_, kHeaderBytes, sequences_, [&](uint64_t i, int32_t length) {
      NEAP_CHECK(length >= 0, place_, "expected a length of sequence ", i, " from 0; found ", length);
      const auto pointer = load<int64_t>(file_, pointers + 8 * i);
      NEAP_CHECK(pointer == next, place_, "expected sequence ", i, " at byte ", next, " of ", bin_,
                 ", where the one before it ends; found ", pointer);
      NEAP_CHECK(length <= (bin_bytes_ - next) / width, place_, "expected sequence ", i, " within ", bin_,
                 "; found it from byte ", next, " on for ", length, " tokens of ", width,
                 " bytes, and the file ends at ", bin_bytes_);
      next += length * width;
      if (i % kReleased == 0 && i > 0) file_.release(pointers + 8 * (i - kReleased), 8 * kReleased);
    });
    NEAP_CHECK(next == bin_bytes_, place_, "expected all of ", bin_, "; found sequences up to byte ", next,
               ", the file ends at ", bin_bytes_);
    tokens_ = next / width;
  }

  void read_documents() const {
    NEAP_CHECK(entries_ >= 1, place_, "expected at least one document entry; found none");
    int64_t last = 0;
    for_each<int64_t>(file_, kHeaderBytes + 12 * sequences_, entries_, [&](uint64_t i, int64_t first) {
      NEAP_CHECK(i > 0 || first == 0, place_, "expected the first document at sequence 0; found ", first);
      NEAP_CHECK(first >= last && first <= static_cast<int64_t>(sequences_), place_, "expected document entry ", i,
                 " from ", last, " to ", sequences_, "; found ", first);
      last = first;
    });
    NEAP_CHECK(last == static_cast<int64_t>(sequences_), place_, "expected the last document to end with sequence ",
               sequences_, "; found ", last);
  }

  const std::string bin_;
  const std::string place_;
  const int64_t bin_bytes_;
  const MappedFile file_;
  TokenType type_ = TokenType::kUint16;
  uint64_t sequences_ = 0;
  uint64_t entries_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace

MegatronPaths megatron_paths(const std::filesystem::path& path) {
  std::string name = path.string();
  if (name.ends_with(".bin") || name.ends_with(".idx")) name.resize(name.size() - 4);
  return {.bin = name + ".bin", .idx = name + ".idx"};
}

MegatronIndex read_megatron_index(const MegatronPaths& paths, int64_t bin_bytes) {
  return Reader(paths, bin_bytes).read();
}

}  // namespace neap::train
