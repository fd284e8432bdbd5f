// torch-free
#include "tests/fuzz/fuzzer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "neap/base/error.h"

// How often each branch was taken in this run, by the way it was come to (as AFL counts edges).
namespace {
constexpr size_t kWays = 1 << 16;
std::array<uint8_t, kWays> taken;
uintptr_t last_place = 0;
}  // namespace

// The compiler gives both names.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" void __sanitizer_cov_trace_pc() {
  // Relative to this function: the same number wherever the program was loaded.
  const uintptr_t place =
      reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - reinterpret_cast<uintptr_t>(&__sanitizer_cov_trace_pc);
  uint8_t& count = taken[(place ^ (last_place >> 1)) * 0x9e3779b97f4a7c15 >> 48];
  count = static_cast<uint8_t>(count + (count < 255 ? 1 : 0));
  last_place = place;
}

// Of the sanitizers' runtimes, where there is one.
extern "C" [[gnu::weak]] void __sanitizer_set_death_callback(void (*callback)());
// NOLINTEND(readability-identifier-naming)

namespace neap::fuzz {
namespace {

constexpr size_t kLongest = 16384;

const std::string* current_input = nullptr;
const std::string* current_name = nullptr;

std::string keep_input() {
  const auto path = std::filesystem::temp_directory_path() / ("neap-fuzz-" + *current_name);
  std::ofstream(path, std::ios::binary) << *current_input;
  return path.string();
}

void at_death() {
  if (current_input != nullptr) std::fprintf(stderr, "fuzz: the input is in %s\n", keep_input().c_str());
}

class Mutator {
 public:
  Mutator(const Options& options, const std::vector<std::string>& corpus)
      : random_(options.seed), dictionary_(options.dictionary), corpus_(corpus) {}

  std::string next() {
    std::string input = corpus_[below(corpus_.size())];
    for (size_t changes = 1 + below(4); changes > 0; --changes) change(input);
    if (input.size() > kLongest) input.resize(kLongest);
    return input;
  }

 private:
  size_t below(size_t bound) { return static_cast<size_t>(random_() % std::max<size_t>(bound, 1)); }

  void change(std::string& input) {
    const size_t at = below(input.size());
    const size_t count = std::min(input.size() - at, 1 + below(below(2) == 0 ? 4 : 64));
    switch (below(8)) {
      case 0:
        if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
        break;
      case 1:
        if (!input.empty()) input[at] = static_cast<char>(random_());
        break;
      case 2:
        put_number(input, at);
        break;
      case 3:
        input.erase(at, count);
        break;
      case 4:
        input.insert(below(input.size() + 1), input.substr(at, count));
        break;
      case 5:
        input.resize(at);
        break;
      case 6:
        if (!dictionary_.empty()) input.insert(at, dictionary_[below(dictionary_.size())]);
        break;
      default: {
        const std::string& other = corpus_[below(corpus_.size())];
        const size_t from = below(other.size());
        input.replace(at, count, other.substr(from, 1 + below(64)));
      }
    }
  }

  // A number at the border of something, as one of a file's fields or as text.
  void put_number(std::string& input, size_t at) {
    const auto size = static_cast<int64_t>(input.size());
    const int64_t numbers[] = {0,         1,         -1,        size,      size - 1,         size + 1,
                               INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int64_t{1} << 60, UINT32_MAX,
                               2,         8,         255,       65535,     1'000'000'000,    -2};
    const int64_t number = numbers[below(std::size(numbers))];
    if (below(3) == 0) {
      input.insert(at, std::to_string(number));
      return;
    }
    const size_t width = size_t{1} << below(4);
    if (input.size() >= at + width) std::memcpy(input.data() + at, &number, width);
  }

  std::mt19937_64 random_;
  const std::vector<std::string>& dictionary_;
  const std::vector<std::string>& corpus_;
};

// The powers of two that counts of each way have reached so far.
class Seen {
 public:
  // Whether the run that just ended took a way, or a way so often, as none before.
  bool learn() {
    bool fresh = false;
    for (size_t i = 0; i < kWays; ++i) {
      if (taken[i] == 0) continue;
      const uint8_t reached = std::bit_floor(taken[i]);
      fresh = fresh || (seen_[i] & reached) == 0;
      seen_[i] = static_cast<uint8_t>(seen_[i] | reached);
    }
    return fresh;
  }
  size_t ways() const { return kWays - static_cast<size_t>(std::ranges::count(seen_, uint8_t{0})); }

 private:
  std::array<uint8_t, kWays> seen_{};
};

}  // namespace

Report fuzz(const Options& options, const Target& target) {
  if (&__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(&at_death);
  current_name = &options.name;
  Report report;
  std::vector<std::string> corpus = options.corpus;
  Mutator mutator(options, corpus);
  Seen seen;
  const auto end = std::chrono::steady_clock::now() + options.limit;
  for (size_t given = 0; std::chrono::steady_clock::now() < end && report.finding.empty(); ++report.runs) {
    // What was given first, as it is.
    const bool is_given = given < options.corpus.size();
    const std::string input = is_given ? options.corpus[given++] : mutator.next();
    current_input = &input;
    taken.fill(0);
    last_place = 0;
    try {
      target(input);
      ++report.accepted;
    } catch (const UserError&) {  // what a reader has to say
    } catch (const std::exception& error) {
      report.finding = error.what();
      report.finding_file = keep_input();
    }
    if (seen.learn() && !is_given) corpus.push_back(input);
    current_input = nullptr;
  }
  report.kept = corpus.size();
  report.ways = seen.ways();
  return report;
}

}  // namespace neap::fuzz
