// The C++ side of smollm2_step.py: a process that runs one forward and backward each time it is asked.
//
//   smollm2_step MODEL_DIR BATCH SEQUENCE THREADS
//
// Prints "ready", then for each line on standard input one line "milliseconds loss".
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "neap/models/hugging_face.h"

namespace {

void serve(const char* model_dir, int64_t batch, int64_t sequence, int threads) {
  at::set_num_threads(threads);
  const auto model = neap::models::model_from_hf(model_dir);
  const auto parameters = model->parameters();
  // The same tokens as in smollm2_step.py; labels are the next ones.
  const at::Tensor tokens =
      at::arange(batch * (sequence + 1), at::kLong).mul_(7919).remainder_(model->config().vocab_size);
  const at::Tensor rows = tokens.view({batch, sequence + 1});
  const at::Tensor ids = rows.slice(1, 0, sequence).contiguous();
  const at::Tensor labels = rows.slice(1, 1).contiguous();
  std::puts("ready");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const auto begin = std::chrono::steady_clock::now();
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    const at::Tensor loss = model->loss(ids, labels);
    loss.backward();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
    std::printf("%.3f %.6f\n", elapsed.count(), loss.item<double>());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("usage: smollm2_step MODEL_DIR BATCH SEQUENCE THREADS\n", stderr);
    return 2;
  }
  try {
    serve(argv[1], std::stoll(argv[2]), std::stoll(argv[3]), std::stoi(argv[4]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
