// What reading costs: host memory over a token file of 4 GiB, waiting for batches, and the start from a checkpoint.
//
//   data_bench memory    peak of host memory that grows while a file of 4 GiB is checked and read at random
//   data_bench wait      what a step of 10 ms waits for its batch
//   data_bench startup   loading a checkpoint of 500 MB over reading its file into memory, in turn
#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/figure.h"
#include "neap/base/error.h"
#include "neap/models/hugging_face.h"
#include "neap/train/batch_reader.h"

namespace neap::bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "neap-data-bench-XXXXXX").string();
    NEAP_CHECK(::mkdtemp(pattern.data()) != nullptr, "no folder for temporary files");
    path_ = pattern;
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  fs::path operator/(const char* name) const { return path_ / name; }

 private:
  fs::path path_;
};

// All zeros, and no more than a block on the disk.
fs::path sparse_tokens(const Folder& folder, int64_t bytes) {
  const fs::path path = folder / "tokens.bin";
  std::ofstream(path, std::ios::binary).put('\0');
  fs::resize_file(path, static_cast<uintmax_t>(bytes));
  return path;
}

// A field of /proc/self/status, in KiB. VmHWM counts everything resident, also pages of mapped files.
int64_t status_kib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::atoll(line.c_str() + field.size() + 1);
  }
  return 0;
}

// What resident memory grew by, at most, while `body` ran.
double growth_mib(const std::function<void()>& body) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins here
  const int64_t before = status_kib("VmRSS");
  body();
  return static_cast<double>(status_kib("VmHWM") - before) / 1024;
}

double reading_grows_by(int64_t file_bytes) {
  const Folder folder;
  const fs::path path = sparse_tokens(folder, file_bytes);
  return growth_mib([&] {
    const auto file = train::TokenFile::open(path);
    file.check_vocabulary(50000);
    const train::Sequences sequences(file, {.length = 2048, .shuffle = true, .seed = 1});
    train::BatchReader batches(sequences, {.batch = 8, .sequence = 2048, .stride = 8});
    for (int64_t step = 0; step < 2000; ++step) batches.read(8 * step);
  });
}

int memory() {
  const double small = reading_grows_by(int64_t{64} << 20);
  const double large = reading_grows_by(int64_t{4} << 30);
  std::printf("peak of resident memory grew by %.1f MiB over 64 MiB of tokens, by %.1f MiB over 4 GiB\n", small, large);
  print_figure("reader_memory_4GiB", large, "MiB", 16);
  return 0;
}

double quantile(std::vector<double> values, double q) {
  std::ranges::sort(values);
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

int wait() {
  const Folder folder;
  const auto file = train::TokenFile::open(sparse_tokens(folder, int64_t{1} << 30));
  const train::Sequences sequences(file, {.length = 4096, .shuffle = true, .seed = 1});
  train::BatchReader batches(sequences, {.batch = 16, .sequence = 4096, .stride = 16});
  constexpr int64_t kSteps = 200;
  std::vector<double> waits;
  batches.read(0);  // nobody could have read this one ahead
  const auto before = batches.waited();
  for (int64_t step = 1; step <= kSteps; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // as long as a device computes
    const auto waited = batches.waited();
    batches.read(16 * step);
    waits.push_back(milliseconds(batches.waited() - waited));
  }
  // Where others use the machine, the mean is that of the few steps in which the reader was not given a core.
  std::printf("of %zu steps the median waited %.4f ms, one in ten %.4f ms or more, the longest %.1f ms\n", waits.size(),
              quantile(waits, 0.5), quantile(waits, 0.9), quantile(waits, 1));
  print_figure("reader_wait_per_step", milliseconds(batches.waited() - before) / kSteps, "ms", 0.1);
  return 0;
}

// 125 million parameters, 500 MB.
models::ModelConfig config() {
  models::ModelConfig config;
  config.vocab_size = 32000;
  config.hidden_size = 768;
  config.intermediate_size = 2048;
  config.num_hidden_layers = 11;
  config.num_attention_heads = config.num_key_value_heads = 12;
  config.head_dim = 64;
  config.tie_word_embeddings = false;
  return config;
}

// The file into memory that is there for it, with as few calls as the system wants.
void read_whole(const fs::path& path) {
  const auto size = static_cast<size_t>(fs::file_size(path));
  const std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::malloc(size)), &std::free);
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  NEAP_ASSERT(memory != nullptr && descriptor >= 0);
  for (size_t done = 0; done < size;) {
    const ssize_t now = ::read(descriptor, memory.get() + done, size - done);
    NEAP_ASSERT(now > 0);
    done += static_cast<size_t>(now);
  }
  ::close(descriptor);
}

// What `body` returns in a process of its own, whose memory nobody has touched before, as at the start of a run.
double in_child(const std::function<double()>& body) {
  int ends[2];
  NEAP_ASSERT(::pipe(ends) == 0);
  const pid_t child = ::fork();
  NEAP_ASSERT(child >= 0);
  if (child == 0) {
    const double value = body();
    ::_exit(::write(ends[1], &value, sizeof value) == sizeof value ? 0 : 1);
  }
  double value = 0;
  ::close(ends[1]);
  const bool told = ::read(ends[0], &value, sizeof value) == sizeof value;
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  NEAP_CHECK(told && status == 0, "a measuring process failed");
  return value;
}

double timed(const std::function<void()>& body) {
  const auto begin = Clock::now();
  body();
  return milliseconds(Clock::now() - begin);
}

int startup() {
  const Folder folder;
  const fs::path dir = folder / "model";
  in_child([&] {
    models::save_hf(*models::make_model(config()), dir);
    return 0.0;
  });
  const fs::path weights = dir / "model.safetensors";
  std::vector<double> reads, loads, ratios;
  for (int round = 0; round < 9; ++round) {
    reads.push_back(in_child([&] { return timed([&] { read_whole(weights); }); }));
    loads.push_back(in_child([&] { return timed([&] { models::model_from_hf(dir); }); }));
    ratios.push_back(loads.back() / reads.back());
  }
  const auto median = [](const std::vector<double>& values) { return quantile(values, 0.5); };
  std::printf("%.0f MB: read in %.1f ms, loaded in %.1f ms (medians of 9)\n",
              static_cast<double>(fs::file_size(weights)) / 1e6, median(reads), median(loads));
  print_figure("checkpoint_startup_ratio", median(ratios), "x", 1.2);
  return 0;
}

}  // namespace
}  // namespace neap::bench

int main(int argc, char** argv) {
  try {
    if (argc == 2 && std::strcmp(argv[1], "memory") == 0) return neap::bench::memory();
    if (argc == 2 && std::strcmp(argv[1], "wait") == 0) return neap::bench::wait();
    if (argc == 2 && std::strcmp(argv[1], "startup") == 0) return neap::bench::startup();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::fputs("usage: data_bench memory|wait|startup\n", stderr);
  return 2;
}
