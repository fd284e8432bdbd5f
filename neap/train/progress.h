// torch-free
// What a run prints while it goes: one line a step, and on a terminal a bar below them.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "neap/train/metrics.h"

namespace neap::train {

class Progress {
 public:
  // `terminal`: the stream understands carriage returns and the escape that clears a line.
  Progress(std::ostream& out, bool terminal, int64_t steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepMetrics& metrics);
  // A line of its own, above the bar.
  void line(const std::string& text);

 private:
  void clear_bar();
  void draw_bar();

  std::ostream& out_;
  const bool terminal_;
  const int64_t steps_;
  int64_t done_ = 0;
  int64_t taken_ = 0;  // here; those before a resumed run are done, too
  double total_ms_ = 0;
};

// "step 3/10  loss 2.3456  grad_norm 1.234  lr 3.00e-04  812 tok/s  step 2.52 s …"
std::string step_line(const StepMetrics& metrics, int64_t steps);

// 3.14159 with 2 digits is "3.14"; also nan, inf and -inf.
std::string fixed(double value, int digits);
// One line of a table of two columns.
std::string table_row(std::string what, const std::string& value);

// "12.3 ms", "4.56 s", "2 min 5 s".
std::string format_ms(double milliseconds);

// The table at the end of a run: peak, times, traffic, and how much of the planned drop came true.
std::string final_table(const RunSummary& summary);

}  // namespace neap::train
