#include "neap/files/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/json_text.h"

namespace neap::files {
namespace {

using neap::internal::concat;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian and are mapped as they are");

using Json = nlohmann::json;

struct TypeInfo {
  SafeType type;
  std::string_view name;
  int64_t size;
};
constexpr std::array kTypes = {
    TypeInfo{SafeType::kBool, "BOOL", 1}, TypeInfo{SafeType::kU8, "U8", 1},     TypeInfo{SafeType::kI8, "I8", 1},
    TypeInfo{SafeType::kI16, "I16", 2},   TypeInfo{SafeType::kI32, "I32", 4},   TypeInfo{SafeType::kI64, "I64", 8},
    TypeInfo{SafeType::kF16, "F16", 2},   TypeInfo{SafeType::kBF16, "BF16", 2}, TypeInfo{SafeType::kF32, "F32", 4},
    TypeInfo{SafeType::kF64, "F64", 8},
};
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation

const TypeInfo& info_of(SafeType type) { return kTypes[static_cast<std::size_t>(type)]; }

// Nothing when a dimension is negative or the product overflows.
std::optional<int64_t> bytes_of(const SafeTensorInfo& tensor) {
  int64_t bytes = size_of(tensor.type);
  for (const int64_t dim : tensor.shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) return std::nullopt;
  }
  return bytes;
}

bool all_integers(const Json& list) {
  return list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& x) { return x.is_number_integer(); });
}

[[noreturn]] void fail_at(const std::filesystem::path& path, const std::string& what) {
  NEAP_USER_ERROR("[files] ", path.string(), " ", what, "; fetch or save the file again");
}

// What the header says of one tensor.
struct Entry {
  int64_t begin;  // after the header
  SafeTensorInfo info;
};

Entry parse_entry(const std::string& name, const Json& json, const std::filesystem::path& path) {
  const bool complete = json.is_object() && json.contains("dtype") && json["dtype"].is_string() &&
                        json.contains("shape") && all_integers(json["shape"]) && json.contains("data_offsets") &&
                        all_integers(json["data_offsets"]) && json["data_offsets"].size() == 2;
  if (!complete) fail_at(path, concat("describes tensor '", name, "' wrongly: ", json.dump()));
  const auto type = type_named(json["dtype"].get_ref<const std::string&>());
  if (!type) {
    fail_at(path, concat("holds tensor '", name, "' of dtype ", json["dtype"].dump(), ", which is not supported"));
  }
  Entry entry{json["data_offsets"][0].get<int64_t>(), {name, *type, json["shape"].get<std::vector<int64_t>>(), 0}};
  const auto end = json["data_offsets"][1].get<int64_t>();
  const auto bytes = bytes_of(entry.info);
  if (!bytes || entry.begin < 0 || end < entry.begin || end - entry.begin != *bytes) {
    fail_at(path, concat("gives tensor '", name, "' the bytes ", entry.begin, " to ", end,
                         ", which do not fit its shape ", json["shape"].dump(), " of ", name_of(*type)));
  }
  entry.info.bytes = *bytes;
  return entry;
}

}  // namespace

std::string_view name_of(SafeType type) { return info_of(type).name; }
int64_t size_of(SafeType type) { return info_of(type).size; }

std::optional<SafeType> type_named(std::string_view name) {
  for (const TypeInfo& info : kTypes) {
    if (info.name == name) return info.type;
  }
  return std::nullopt;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), file_(path, concat("[files] ", path.string(), " ")) {
  parse_header();
}

void SafetensorsFile::parse_header() {
  const std::byte* const data = file_.bytes().data();
  const auto size = static_cast<int64_t>(file_.size());
  if (size < kLengthBytes) fail(concat("is truncated: ", size, " bytes hold no header length"));
  uint64_t length = 0;
  std::memcpy(&length, data, sizeof length);
  if (length > kMaxHeader) fail(concat("is not a safetensors file: it claims a header of ", length, " bytes"));
  body_ = kLengthBytes + static_cast<int64_t>(length);
  if (body_ > size) fail(concat("is truncated: the header ends at byte ", body_, ", the file at ", size));
  const auto header = parse_json<Json>({reinterpret_cast<const char*>(data + kLengthBytes), length});
  if (header.is_discarded() || !header.is_object()) fail("is not a safetensors file: its header is not a JSON object");

  std::vector<Entry> found;
  for (const auto& [name, json] : header.items()) {
    if (name != "__metadata__") {
      found.push_back(parse_entry(name, json, path_));
      continue;
    }
    if (!json.is_object()) fail("has __metadata__ that is not an object");
    for (const auto& [key, value] : json.items()) {
      metadata_[key] = value.is_string() ? value.get<std::string>() : value.dump();
    }
  }
  std::ranges::sort(found, {}, [](const Entry& entry) { return std::pair(entry.begin, entry.info.bytes); });
  const int64_t available = size - body_;
  int64_t expected = 0;
  for (Entry& entry : found) {
    if (entry.begin != expected) {
      fail(concat("has tensor '", entry.info.name, "' at byte ", entry.begin, " where ", expected,
                  " was expected: tensors overlap or leave a gap"));
    }
    if (entry.info.bytes > available - expected) {
      fail(concat("is truncated: tensor '", entry.info.name, "' ends at byte ", entry.begin + entry.info.bytes,
                  " after the header, the file at ", available));
    }
    expected += entry.info.bytes;
    offsets_.push_back(entry.begin);
    tensors_.push_back(std::move(entry.info));
  }
  if (expected != available) fail(concat("has ", available - expected, " bytes after its last tensor"));
}

std::span<const std::byte> SafetensorsFile::bytes(std::size_t index) const {
  return file_.bytes().subspan(static_cast<std::size_t>(body_ + offsets_.at(index)),
                               static_cast<std::size_t>(tensors_[index].bytes));
}

void SafetensorsFile::read(std::size_t index, std::span<std::byte> out) const {
  NEAP_ASSERT(std::cmp_equal(out.size(), tensors_.at(index).bytes), tensors_[index].name);
  file_.read(static_cast<std::size_t>(body_ + offsets_[index]), out);
}

void SafetensorsFile::fail(const std::string& what) const { fail_at(path_, what); }

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, const std::vector<SafeTensorInfo>& tensors,
                                     const std::map<std::string, std::string>& metadata, FileSystem& system)
    : file_(path, system) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const SafeTensorInfo& tensor : tensors) {
    const auto bytes = bytes_of(tensor);
    NEAP_ASSERT(bytes.has_value(), tensor.name);
    header[tensor.name] = {
        {"dtype", name_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + *bytes}}};
    offset += *bytes;
    sizes_.push_back(*bytes);
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // tensors start aligned for every type
  const uint64_t length = text.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(std::as_bytes(std::span(text)));
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  NEAP_ASSERT(next_ < sizes_.size() && std::cmp_equal(sizes_[next_], bytes.size()), "tensor ", next_, " of ",
              sizes_.size());
  file_.write(bytes);
  ++next_;
}

void SafetensorsWriter::finish() {
  NEAP_ASSERT(next_ == sizes_.size(), next_, " of ", sizes_.size(), " tensors were written");
  file_.commit();
}

}  // namespace neap::files
