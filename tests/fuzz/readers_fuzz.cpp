// torch-free
// The readers of what comes from outside, on input that nobody would write: run files, safetensors, token files and
// Megatron's indexes. Whatever they are given, they take it or throw a UserError, and what they take has the properties
// that the rest relies on.
//
// NEAP_FUZZ_SECONDS: how long each reader is tried (the sanitizer build takes longer by itself).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "neap/base/error.h"
#include "neap/files/safetensors.h"
#include "neap/train/megatron_index.h"
#include "neap/train/schema.h"
#include "neap/train/token_file.h"
#include "neap/train/yaml_config.h"
#include "tests/fuzz/fuzzer.h"

namespace neap::fuzz {
namespace {

// A file in memory that is written anew for each input.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("neap-fuzz", MFD_CLOEXEC)) { NEAP_ASSERT(descriptor_ >= 0); }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string write(std::string_view bytes) {
    NEAP_ASSERT(::ftruncate(descriptor_, 0) == 0);
    NEAP_ASSERT(::pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    return "/proc/self/fd/" + std::to_string(descriptor_);
  }

 private:
  int descriptor_;
};

std::chrono::milliseconds limit() {
  const char* asked = std::getenv("NEAP_FUZZ_SECONDS");
  return std::chrono::milliseconds(
      static_cast<int64_t>(1000 * (asked != nullptr ? std::atof(asked) : NEAP_FUZZ_SECONDS)));
}

void expect_no_finding(Options options, const Target& target) {
  options.limit = limit();
  const Report report = fuzz(options, target);
  std::printf("  %s: %lld inputs, %lld of them good, %zu kept, %zu ways\n", options.name.c_str(),
              static_cast<long long>(report.runs), static_cast<long long>(report.accepted), report.kept, report.ways);
  EXPECT_EQ(report.finding, "") << "the input is in " << report.finding_file;
  // Else the corpus was refused, or nothing was measured: the run would prove nothing.
  EXPECT_GE(report.accepted, static_cast<int64_t>(options.corpus.size()));
  EXPECT_GT(report.kept, options.corpus.size());
}

template <class T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

constexpr std::string_view kRunFile = R"(
model: {path: model, init: random}
data:
  path: "data/x.bin"   # a comment
  format: megatron
train: &t
  steps: 3
  batch: 2
  seed: 1
optim:
  lr: 1e-3
  betas: [0.9, 0.95]
device: {type: sim, capacity: 2.5 GiB, latency: 5us, d2h: 25GB/s}
offload:
  mode: async
  modules: [ "model.layers.{*}" ]
  prefetch: 64MiB
log:
  dir: |
    out
)";

// What a run leaves of its configuration can be read, and is the same.
void expect_read_again(const train::RunConfig& config) {
  const std::string written = train::to_yaml(config);
  const std::string again = [&] {
    try {
      return train::to_yaml(train::parse_config(written, "written.yaml", {}));
    } catch (const UserError& error) {  // not this input's fault
      return std::string(error.what());
    }
  }();
  NEAP_ASSERT(again == written, again);
}

TEST(Fuzz, ARunFileIsTakenOrRefusedAndWhatIsTakenIsWrittenAsItIsRead) {
  Options options{.name = "run-file", .corpus = {std::string(kRunFile)}};
  options.corpus.push_back(train::to_yaml(train::parse_config(std::string(kRunFile), "run.yaml", {})));
  for (const train::Key& key : train::keys()) {
    options.dictionary.push_back(key.path.substr(key.path.find('.') + 1) + ": ");
    options.dictionary.push_back(key.path.substr(0, key.path.find('.')) + ":\n  ");
  }
  for (const char* word : {"\n",    "  ",
                           ": ",    "- ",
                           "[",     "]",
                           "{",     "}",
                           "&t ",   "*t",
                           "<<: ",  "!!int ",
                           "|\n",   ">\n",
                           "\"",    "'",
                           "#",     "---\n",
                           "...\n", "~",
                           "null",  ".nan",
                           "-.inf", "1e999",
                           "0x",    "9223372036854775808",
                           "KiB",   "us",
                           "\xff",  "\xef\xbb\xbf",
                           "? "}) {
    options.dictionary.emplace_back(word);
  }
  expect_no_finding(options, [](std::string_view input) {
    const train::RunConfig config = train::parse_config(std::string(input), "run.yaml", {});
    expect_read_again(config);
    try {
      expect_read_again(train::resolve(config, 2));
    } catch (const UserError&) {  // of resolve() alone
    }
  });
}

// The header's length, the header, and what follows. Made here from two of them, so that changes of the header are not
// all refused for their length: everything up to the first line end is the header. "R" first: the bytes as they are.
std::string safetensors_of(std::string_view input) {
  if (input.starts_with('R')) return std::string(input.substr(1));
  const size_t end = std::min(input.find('\n'), input.size());
  return raw<uint64_t>({end}) + std::string(input.substr(0, end)) +
         std::string(input.substr(std::min(end + 1, input.size())));
}

TEST(Fuzz, ASafetensorsFileIsRefusedOrItsTensorsLieInIt) {
  MemoryFile file;
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"c":{"dtype":"U8","shape":[0,9],"data_offsets":[26,26]}})";
  const std::string body(26, 'x');
  Options options{.name = "safetensors",
                  .corpus = {header + "\n" + body, "R" + safetensors_of(header + "\n" + body), "{}"},
                  .dictionary = {"\"dtype\":",
                                 "\"shape\":",
                                 "\"data_offsets\":",
                                 "\"F64\"",
                                 "\"I8\"",
                                 "\"BOOL\"",
                                 "[",
                                 "]",
                                 "{",
                                 "}",
                                 ",",
                                 ":",
                                 "null",
                                 "true",
                                 "-1",
                                 "1e400",
                                 "\"\\u0000\"",
                                 "\"a\":",
                                 "4294967296",
                                 "18446744073709551615",
                                 "\n"}};
  expect_no_finding(options, [&](std::string_view input) {
    const std::string bytes = safetensors_of(input);
    const files::SafetensorsFile tensors(file.write(bytes));
    size_t total = 0;
    for (size_t i = 0; i < tensors.tensors().size(); ++i) {
      const auto data = tensors.bytes(i);
      NEAP_ASSERT(static_cast<int64_t>(data.size()) == tensors.tensors()[i].bytes, "tensor ", i);
      // The bytes themselves: they have to be those of the end of the file, one tensor after the other.
      total += data.size();
      NEAP_ASSERT(total <= bytes.size(), "tensor ", i);
      for (const int64_t dim : tensors.tensors()[i].shape) NEAP_ASSERT(dim >= 0, "tensor ", i);
    }
    size_t place = bytes.size() - total;
    for (size_t i = 0; i < tensors.tensors().size(); ++i) {
      const auto data = tensors.bytes(i);
      NEAP_ASSERT(data.empty() || std::memcmp(data.data(), bytes.data() + place, data.size()) == 0, "tensor ", i);
      place += data.size();
    }
  });
}

std::string llmc(int32_t magic, int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = tokens;
  return raw(header);
}

// The first byte chooses format and type.
TEST(Fuzz, ATokenFileIsRefusedOrAllItsTokensCanBeRead) {
  MemoryFile file;
  using train::DataFormat;
  using train::TokenType;
  Options options{
      .name = "token-file",
      .corpus = {std::string(1, 0) + raw<uint16_t>({1, 2, 3}), "\x01" + raw<int64_t>({1, 2}),
                 "\x02" + llmc(20240520, 1, 2) + "abcd", "\x02" + llmc(20240801, 7, 1) + "abcd", "\x03text"}};
  expect_no_finding(options, [&](std::string_view input) {
    const int choice = input.empty() ? 0 : input.front() & 3;
    const DataFormat formats[] = {DataFormat::kNanoGpt, DataFormat::kNanoGpt, DataFormat::kLlmC, DataFormat::kText};
    const std::string path = file.write(input.substr(std::min<size_t>(input.size(), 1)));
    const auto tokens =
        train::TokenFile::open(path, formats[choice], choice == 0 ? TokenType::kUint16 : TokenType::kInt64);
    std::vector<int64_t> all(static_cast<size_t>(tokens.size()));
    tokens.read(0, all);
    bool good = true;
    for (const int64_t token : all) good = good && token >= 0 && token < 1000;
    bool checked = true;
    try {
      tokens.check_vocabulary(1000);
    } catch (const UserError&) {
      checked = false;
    }
    NEAP_ASSERT(good == checked, "the check says ", checked);
  });
}

TEST(Fuzz, AMegatronIndexIsRefusedOrCoversItsTokenFile) {
  MemoryFile file;
  const auto index = [](uint8_t code, const std::vector<int32_t>& lengths, const std::vector<int64_t>& pointers,
                        const std::vector<int64_t>& documents) {
    return std::string("MMIDIDX\0\0", 9) + raw<uint64_t>({1}) + raw<uint8_t>({code}) +
           raw<uint64_t>({lengths.size(), documents.size()}) + raw(lengths) + raw(pointers) + raw(documents);
  };
  // Before the index, the size of its token file.
  Options options{
      .name = "megatron-index",
      .corpus = {raw<int64_t>({10}) + index(8, {2, 0, 3}, {0, 4, 4}, {0, 1, 3}),
                 raw<int64_t>({8}) + index(4, {1, 1}, {0, 4}, {0, 1, 2}), raw<int64_t>({0}) + index(5, {}, {}, {0})}};
  expect_no_finding(options, [&](std::string_view input) {
    int64_t bin_bytes = 0;
    std::memcpy(&bin_bytes, input.data(), std::min(input.size(), sizeof bin_bytes));
    bin_bytes &= INT64_MAX;
    const std::string path = file.write(input.substr(std::min(input.size(), sizeof bin_bytes)));
    const train::MegatronIndex found = train::read_megatron_index({.bin = "x.bin", .idx = path}, bin_bytes);
    NEAP_ASSERT(found.tokens >= 0 && found.tokens <= bin_bytes && found.documents >= 0 && found.sequences >= 0);
    NEAP_ASSERT(found.tokens == 0 ? bin_bytes == 0 : bin_bytes % found.tokens == 0);
  });
}

}  // namespace
}  // namespace neap::fuzz
