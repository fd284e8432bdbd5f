// torch-free
// Numbers over steps as TensorBoard reads them: an event file, which is a sequence of TFRecords with one Event each.
//
// The few fields that scalars need are encoded by hand (tensorflow/core/util/event.proto and framework/summary.proto;
// record and checksum: tensorflow/core/lib/io/record_writer.h). Belongs to one run; not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace neap::train {

class TensorBoardFile {
 public:
  // Seconds since 1970.
  using Clock = std::function<double()>;

  // Makes events.out.tfevents.<second>.<host>.<process> in `dir`. Of a run that goes on after `steps_before` steps it
  // tells readers to forget what files from before it say of later ones. UserError when it cannot be written.
  explicit TensorBoardFile(const std::filesystem::path& dir, int64_t steps_before = 0);
  TensorBoardFile(const std::filesystem::path& dir, int64_t steps_before, Clock clock);

  // One event with all of them, on the disk when it returns. Numbers are rounded to float32.
  void scalars(int64_t step, const std::vector<std::pair<std::string_view, double>>& values);

  const std::filesystem::path& path() const { return path_; }

 private:
  void write_record(const std::string& data);

  Clock clock_;
  std::filesystem::path path_;
  std::ofstream out_;
};

namespace internal {

// CRC-32C (Castagnoli), as TFRecords store it: rotated and shifted, since a checksum of data with checksums in it
// says little.
uint32_t masked_crc32c(std::string_view data);

}  // namespace internal
}  // namespace neap::train
