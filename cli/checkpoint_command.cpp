#include "cli/checkpoint_command.h"

#include <filesystem>
#include <iostream>
#include <vector>

#include "cli/exit_codes.h"
#include "neap/base/bytes.h"
#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/reader.h"
#include "neap/train/model_directory.h"

namespace neap::cli {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> checkpoints_at(const fs::path& dir) {
  std::error_code error;
  if (fs::exists(dir / checkpoint::kIndexName, error)) return {dir};
  std::vector<fs::path> all = checkpoint::complete_checkpoints(dir);
  if (all.empty()) all.push_back(checkpoint::checkpoint_at(dir));  // says what is wrong
  return all;
}

}  // namespace

int verify_checkpoint(const std::string& dir) {
  for (const fs::path& path : checkpoints_at(dir)) {
    checkpoint::Reader reader(path);
    reader.verify();
    std::cout << path.string() << ": whole; step " << reader.state("step") << ", saved by " << reader.index().world
              << (reader.index().world == 1 ? " rank, " : " ranks, ") << reader.index().tensors.size() << " tensors of "
              << reader.bytes_read() << std::endl;
  }
  return kOk;
}

int convert_checkpoint(const std::string& dir, const std::string& out) {
  checkpoint::Reader reader(checkpoint::checkpoint_at(dir));
  train::convert_checkpoint(reader, out);
  std::cout << out << ": the model of " << reader.dir().string() << ", step " << reader.state("step") << std::endl;
  return kOk;
}

}  // namespace neap::cli
