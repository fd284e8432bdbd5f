#include "neap/checkpoint/reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <system_error>

#include "neap/base/error.h"
#include "neap/comm/agreement.h"
#include "neap/files/checksum.h"
#include "neap/files/tensor_bytes.h"

namespace neap::checkpoint {
namespace {

namespace fs = std::filesystem;
using neap::internal::concat;

[[noreturn]] void fail(const fs::path& file, const std::string& what) {
  NEAP_USER_ERROR("[checkpoint] ", file.string(), " ", what,
                  "; copy the checkpoint again, or give the directory of another one");
}

std::string shape_text(const std::vector<int64_t>& sizes) { return concat(at::IntArrayRef(sizes)); }

}  // namespace

struct Reader::File {
  fs::path path;
  files::SafetensorsFile content;
  std::map<std::string, std::size_t> places;
  std::set<std::string> checked;

  explicit File(const fs::path& file) : path(file), content(file) {
    for (std::size_t i = 0; i < content.tensors().size(); ++i) places.emplace(content.tensors()[i].name, i);
  }
};

Reader::Reader(fs::path dir) : dir_(std::move(dir)), index_(read_index(dir_ / kIndexName)) {
  files_.resize(index_.files.size());
}
Reader::~Reader() = default;
Reader::Reader(Reader&&) noexcept = default;
Reader& Reader::operator=(Reader&&) noexcept = default;

const std::string& Reader::state(const std::string& key) const {
  const auto found = index_.state.find(key);
  NEAP_CHECK(found != index_.state.end(), "[checkpoint] ", (dir_ / kIndexName).string(), ": expected '", key,
             "' in the state; found none, so no run of neap has saved it; load it with the program that did");
  return found->second;
}

Reader::File& Reader::open(int number) {
  auto& file = files_[static_cast<std::size_t>(number)];
  if (file) return *file;
  const IndexFile& expected = index_.files[static_cast<std::size_t>(number)];
  const fs::path path = dir_ / expected.name;
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  if (error) fail(path, concat("is missing: ", error.message()));
  if (!std::cmp_equal(size, expected.bytes)) {
    fail(path, concat("has ", size, " bytes instead of ", expected.bytes,
                      std::cmp_less(size, expected.bytes) ? ": it is truncated" : ""));
  }
  file = std::make_unique<File>(path);
  for (const auto& [name, tensor] : index_.tensors) {
    for (const IndexPiece& piece : tensor.pieces) {
      if (piece.file != number) continue;
      const auto place = file->places.find(name);
      const auto* info = place == file->places.end() ? nullptr : &file->content.tensors()[place->second];
      const bool fits = info != nullptr && info->type == tensor.type &&
                        info->bytes == (piece.end - piece.begin) * files::size_of(tensor.type);
      if (!fits) fail(path, concat("does not hold what the index says of '", name, "'"));
    }
  }
  return *file;
}

std::span<const std::byte> Reader::bytes(const std::string& name, const IndexPiece& piece) {
  File& file = open(piece.file);
  const std::span<const std::byte> bytes = file.content.bytes(file.places.at(name));
  if (file.checked.contains(name)) return bytes;
  const std::string found = files::checksum_text(bytes);
  if (found != piece.checksum) {
    fail(file.path, concat("is damaged: the elements ", piece.begin, " to ", piece.end, " of '", name,
                           "' have the checksum ", found, " instead of ", piece.checksum));
  }
  file.checked.insert(name);
  bytes_read_ += Bytes(static_cast<int64_t>(bytes.size()));
  return bytes;
}

void Reader::check(const std::vector<Piece>& pieces, const MayStay& may_stay) const {
  std::string faults;
  std::set<std::string_view> asked;
  for (const Piece& piece : pieces) {
    asked.insert(piece.name);
    const auto found = index_.tensors.find(piece.name);
    if (found == index_.tensors.end()) {
      faults += "\n  missing: " + piece.name;
      continue;
    }
    const IndexTensor& tensor = found->second;
    if (tensor.full_size != piece.full_size) {
      faults += concat("\n  misshapen: ", piece.name, " is ", shape_text(tensor.full_size), ", expected ",
                       shape_text(piece.full_size));
    } else if (tensor.type != files::to_safe(piece.data.scalar_type())) {
      faults += concat("\n  of another dtype: ", piece.name, " is ", files::name_of(tensor.type), ", expected ",
                       files::name_of(files::to_safe(piece.data.scalar_type())));
    }
  }
  for (const auto& [name, tensor] : index_.tensors) {
    if (!asked.contains(name) && !(may_stay && may_stay(name))) faults += "\n  unexpected: " + name;
  }
  NEAP_CHECK(faults.empty(), "[checkpoint] ", (dir_ / kIndexName).string(),
             ": these tensors do not fit; is it a checkpoint of another model?", faults);
}

void Reader::read(const std::vector<Piece>& pieces) {
  const at::NoGradGuard no_grad;
  for (const Piece& target : pieces) {
    const IndexTensor& tensor = index_.tensors.at(target.name);
    for (const IndexPiece& piece : tensor.pieces) {
      const int64_t begin = std::max(piece.begin, target.begin), end = std::min(piece.end, target.end);
      if (begin >= end) continue;
      const at::Tensor source = files::tensor_over(bytes(target.name, piece), tensor.type, {piece.end - piece.begin});
      target.data.narrow(0, begin - target.begin, end - begin)
          .copy_(source.narrow(0, begin - piece.begin, end - begin));
    }
  }
}

at::Tensor Reader::tensor(const std::string& name) {
  const auto found = index_.tensors.find(name);
  NEAP_CHECK(found != index_.tensors.end(), "[checkpoint] ", (dir_ / kIndexName).string(), ": expected a tensor '",
             name, "'; found none");
  at::Tensor full = at::empty(found->second.full_size, at::TensorOptions(files::to_torch(found->second.type)));
  read({whole(name, full)});
  return full;
}

void Reader::verify() {
  for (std::size_t file = 0; file < files_.size(); ++file) open(static_cast<int>(file));
  for (const auto& [name, tensor] : index_.tensors) {
    for (const IndexPiece& piece : tensor.pieces) bytes(name, piece);
  }
}

int Reader::files_opened() const noexcept {
  return static_cast<int>(std::ranges::count_if(files_, [](const auto& file) { return file != nullptr; }));
}

void load(Reader& reader, const std::vector<Piece>& pieces, comm::World* world, const Reader::MayStay& may_stay) {
  comm::together(world, "checkpoint", [&] {
    reader.check(pieces, may_stay);
    reader.read(pieces);
  });
}

}  // namespace neap::checkpoint
