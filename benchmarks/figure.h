// How a benchmark tells its figures: one JSON object a line on standard output, as run.py reads them.
#pragma once

#include <cstdio>
#include <optional>
#include <string>

namespace neap::bench {

enum class Better { kLower, kHigher };

inline void print_figure(const std::string& name, double value, const char* unit, std::optional<double> goal = {},
                         Better better = Better::kLower) {
  std::printf(R"({"name": "%s", "value": %.6g, "unit": "%s", "goal": )", name.c_str(), value, unit);
  if (goal) {
    std::printf("%g", *goal);
  } else {
    std::printf("null");
  }
  std::printf(R"(, "better": "%s"})"
              "\n",
              better == Better::kLower ? "lower" : "higher");
  std::fflush(stdout);
}

// Each prints its figures and returns the exit status.
int offload_step(int argc, char** argv);       // offload_step.cpp
int saved_tensor_cost(int argc, char** argv);  // saved_tensor_cost.cpp
int tape_length(int argc, char** argv);        // saved_tensor_cost.cpp
int shard_step(int argc, char** argv);         // shard_step.cpp

}  // namespace neap::bench
