#include "neap/checkpoint/index.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/json_text.h"
#include "neap/files/checksum.h"

namespace neap::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using neap::internal::concat;

std::string text_of(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);  // paths may be no UTF-8
}

std::string checksum_of(const Json& content) { return files::checksum_text(text_of(content)); }

Json to_content(const Index& index) {
  Json out_files = Json::array();
  for (const IndexFile& file : index.files) out_files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  Json tensors = Json::object();
  for (const auto& [name, tensor] : index.tensors) {
    Json pieces = Json::array();
    for (const IndexPiece& piece : tensor.pieces) {
      pieces.push_back(Json::array({piece.file, piece.begin, piece.end, piece.checksum}));
    }
    tensors[name] = {{"dtype", files::name_of(tensor.type)}, {"shape", tensor.full_size}, {"pieces", pieces}};
  }
  return {{"world", index.world}, {"state", index.state}, {"files", out_files}, {"tensors", tensors}};
}

Index from_content(const Json& content, const std::string& place) {
  Index index;
  index.world = content.at("world").get<int>();
  index.state = content.at("state").get<State>();
  for (const Json& file : content.at("files")) {
    index.files.push_back({file.at("name").get<std::string>(), file.at("bytes").get<int64_t>()});
  }
  for (const auto& [name, json] : content.at("tensors").items()) {
    IndexTensor tensor;
    const auto type = files::type_named(json.at("dtype").get<std::string>());
    NEAP_CHECK(type.has_value(), place, " has a dtype of '", name, "' that is not known: ", text_of(json.at("dtype")));
    tensor.type = *type;
    tensor.full_size = json.at("shape").get<std::vector<int64_t>>();
    for (const Json& piece : json.at("pieces")) {
      tensor.pieces.push_back({piece.at(0).get<int>(), piece.at(1).get<int64_t>(), piece.at(2).get<int64_t>(),
                               piece.at(3).get<std::string>()});
    }
    index.tensors.emplace(name, std::move(tensor));
  }
  return index;
}

// What a correct checksum does not tell: that whoever wrote it was right.
void check_values(const Index& index, const std::string& place) {
  NEAP_CHECK(index.world >= 1 && std::cmp_equal(index.files.size(), index.world), place, " has ", index.files.size(),
             " files of ", index.world, " ranks");
  for (const IndexFile& file : index.files) {
    // Only files beside the index: one from elsewhere must not reach others.
    const bool plain = !file.name.empty() && fs::path(file.name).filename() == file.name && file.bytes >= 0;
    NEAP_CHECK(plain, place, " names a file '", file.name, "' of ", file.bytes, " bytes");
  }
  for (const auto& [name, tensor] : index.tensors) {
    const int64_t numel = tensor.numel();
    NEAP_CHECK(numel >= 0, place, " gives '", name, "' an impossible shape");
    for (const IndexPiece& piece : tensor.pieces) {
      const bool inside = piece.file >= 0 && piece.file < index.world && piece.begin >= 0 && piece.begin < piece.end &&
                          piece.end <= numel;
      NEAP_CHECK(inside, place, " has elements ", piece.begin, " to ", piece.end, " of the ", numel, " of '", name,
                 "' in file ", piece.file);
    }
    const bool sorted = std::ranges::is_sorted(tensor.pieces, {}, &IndexPiece::begin);
    NEAP_CHECK(sorted, place, " has the pieces of '", name, "' out of order");
  }
  check_cover(index, place);
}

Json parse(const fs::path& path, const std::string& text) {
  auto json = parse_json<Json>(text);
  NEAP_CHECK(!json.is_discarded() && json.is_object(), "[checkpoint] ", path.string(),
             " is no JSON object: truncated, damaged or not the index of a checkpoint; copy it again, or take another "
             "checkpoint");
  const auto format = json.find("format");
  NEAP_CHECK(format != json.end() && *format == kFormat, "[checkpoint] ", path.string(),
             " is not the index of a Neaptide checkpoint: expected \"format\": \"", kFormat, "\"; found ",
             format == json.end() ? "none" : text_of(*format), "; give the directory of one");
  const auto version = json.find("version");
  const bool known = version != json.end() && *version == kVersion;
  NEAP_CHECK(known, "[checkpoint] ", path.string(), " has version ", version == json.end() ? "none" : text_of(*version),
             " of the format; this program reads version ", kVersion, "; use the one that saved it");
  return json;
}

}  // namespace

int64_t IndexTensor::numel() const {
  int64_t product = 1;
  for (const int64_t size : full_size) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return -1;
  }
  return product;
}

std::string file_of_rank(int rank) {
  char name[40];
  std::snprintf(name, sizeof name, "rank-%05d.safetensors", rank);
  return name;
}

void check_cover(const Index& index, const std::string& place) {
  for (const auto& [name, tensor] : index.tensors) {
    int64_t covered = 0;
    for (const IndexPiece& piece : tensor.pieces) {
      if (piece.begin <= covered) covered = std::max(covered, piece.end);
    }
    NEAP_CHECK(covered == tensor.numel(), place, " has pieces of '", name, "' that cover ", covered, " of its ",
               tensor.numel(), " elements");
  }
}

std::string to_json(const Index& index) {
  const Json content = to_content(index);
  const Json json = {
      {"format", kFormat}, {"version", kVersion}, {"checksum", checksum_of(content)}, {"content", content}};
  return text_of(json, 1) + "\n";
}

Index read_index(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  NEAP_CHECK(file.good(), "[checkpoint] ", path.string(),
             " cannot be read: a save ends with it, so this is no complete checkpoint; give the directory of one");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const Json json = parse(path, text);
  const std::string place = concat("[checkpoint] ", path.string());
  const auto content = json.find("content");
  const auto checksum = json.find("checksum");
  const bool whole = content != json.end() && checksum != json.end() && *checksum == checksum_of(*content);
  NEAP_CHECK(whole, place,
             " is damaged: it does not have the checksum that it was written with; copy it again, or take another "
             "checkpoint");
  try {
    Index index = from_content(*content, place);
    check_values(index, place);
    return index;
  } catch (const Json::exception& error) {
    NEAP_USER_ERROR(place, " is not as this program writes it: ", error.what());
  }
}

}  // namespace neap::checkpoint
