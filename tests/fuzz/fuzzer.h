// torch-free
// A small coverage-guided fuzzer for readers of files, in one process and on any compiler of ours.
//
// The readers are compiled with -fsanitize-coverage=trace-pc; inputs that take a way through them that none before took
// are kept and changed further. Everything follows from the seed, so a finding of one run is a finding of the next.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace neap::fuzz {

struct Options {
  std::string name;
  std::chrono::milliseconds limit{1000};
  uint64_t seed = 1;
  std::vector<std::string> corpus = {};      // what good input looks like
  std::vector<std::string> dictionary = {};  // words worth putting in
};

struct Report {
  int64_t runs = 0;
  int64_t accepted = 0;      // inputs the reader took for good
  size_t kept = 0;           // inputs in the corpus at the end
  size_t ways = 0;           // branches of the readers that were taken
  std::string finding;       // empty: none
  std::string finding_file;  // the input that did it
};

// Reads `input` and throws UserError for what is wrong with it. Any other exception is a finding, and so is what a
// sanitizer reports: the input is then written to a file whose name goes to standard error.
using Target = std::function<void(std::string_view input)>;

Report fuzz(const Options& options, const Target& target);

}  // namespace neap::fuzz
