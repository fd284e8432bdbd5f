// What the tests of this layer share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <c10/core/TensorOptions.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "neap/base/log.h"

namespace neap::models {

inline const at::TensorOptions kDouble = at::TensorOptions(at::kDouble);

struct Batch {
  at::Tensor ids = at::randint(0, 61, {2, 9}, at::kLong);
  at::Tensor labels = at::randint(0, 61, {2, 9}, at::kLong);
};

// A directory of its own, and the warnings that came meanwhile.
class FilesTest : public ::testing::Test {
 protected:
  FilesTest() : dir_(std::filesystem::temp_directory_path() / ("neap_models_" + std::to_string(::getpid()))) {
    former_ = set_log_sink([this](LogLevel, const std::string& text) { warnings_ += text; });
  }
  ~FilesTest() override {
    set_log_sink(former_);
    std::filesystem::remove_all(dir_);
  }

  std::filesystem::path dir_;
  std::string warnings_;
  LogSink former_;
};

}  // namespace neap::models
