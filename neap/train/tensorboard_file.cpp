// torch-free
#include "neap/train/tensorboard_file.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>

#include "neap/base/error.h"

namespace neap::train {
namespace {

using neap::internal::concat;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

// Little-endian, whatever the host is.
template <class Unsigned>
void append_fixed(std::string& out, Unsigned value) {
  for (size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

// Protocol buffers: the wire types that events have.
enum class Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_tag(std::string& out, uint32_t field, Wire wire) {
  append_varint(out, field << 3 | static_cast<uint32_t>(wire));
}

void append_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  append_tag(out, field, Wire::kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

// Event: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7 (tensorflow/core/util/event.proto).
std::string event(double wall_time, int64_t step) {
  std::string out;
  append_tag(out, 1, Wire::kFixed64);
  append_fixed(out, std::bit_cast<uint64_t>(wall_time));
  append_tag(out, 2, Wire::kVarint);
  append_varint(out, static_cast<uint64_t>(step));
  return out;
}

// Summary.Value: tag = 1, simple_value = 2.
std::string summary_value(std::string_view tag, float value) {
  std::string out;
  append_bytes(out, 1, tag);
  append_tag(out, 2, Wire::kFixed32);
  append_fixed(out, std::bit_cast<uint32_t>(value));
  return out;
}

constexpr std::array<uint32_t, 256> crc_table() {
  constexpr uint32_t kReversedPolynomial = 0x82f63b78;
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < table.size(); ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? kReversedPolynomial : 0);
    table[i] = value;
  }
  return table;
}

}  // namespace

namespace internal {

uint32_t masked_crc32c(std::string_view data) {
  static constexpr auto kTable = crc_table();
  uint32_t crc = 0xffffffff;
  for (const char c : data) crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  crc = ~crc;
  return std::rotr(crc, 15) + 0xa282ead8;
}

}  // namespace internal

TensorBoardFile::TensorBoardFile(const std::filesystem::path& dir, int64_t steps_before)
    : TensorBoardFile(dir, steps_before, seconds_now) {}

TensorBoardFile::TensorBoardFile(const std::filesystem::path& dir, int64_t steps_before, Clock clock)
    : clock_(std::move(clock)) {
  const double now = clock_();
  path_ = dir / concat("events.out.tfevents.", static_cast<int64_t>(now), ".", host_name(), ".", ::getpid());
  out_.open(path_, std::ios::binary | std::ios::trunc);
  NEAP_CHECK(out_.good(), "[log.tensorboard] ", path_.string(),
             " cannot be written; check the directory's permissions");
  std::string first = event(now, 0);
  append_bytes(first, 3, "brain.Event:2");
  write_record(first);
  if (steps_before == 0) return;
  constexpr std::string_view kStart = "\x08\x01";  // SessionLog: status = 1, START
  std::string begin = event(now, steps_before + 1);
  append_bytes(begin, 7, kStart);
  write_record(begin);
}

void TensorBoardFile::scalars(int64_t step, const std::vector<std::pair<std::string_view, double>>& values) {
  std::string summary;
  for (const auto& [tag, value] : values) append_bytes(summary, 1, summary_value(tag, static_cast<float>(value)));
  std::string data = event(clock_(), step);
  append_bytes(data, 5, summary);
  write_record(data);
}

// Length, its checksum, data, its checksum.
void TensorBoardFile::write_record(const std::string& data) {
  std::string record;
  append_fixed(record, static_cast<uint64_t>(data.size()));
  append_fixed(record, internal::masked_crc32c(record));
  record += data;
  append_fixed(record, internal::masked_crc32c(data));
  out_ << record << std::flush;
  NEAP_CHECK(out_.good(), "[log.tensorboard] ", path_.string(),
             " cannot be written any more; check the space on the disk");
}

}  // namespace neap::train
