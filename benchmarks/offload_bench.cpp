// What offload costs and what it brings. One executable, since most of what it links is the same:
//
//   offload_bench step          a Llama step on the simulated accelerator, on its virtual clock: the same on every
//   machine offload_bench saved_tensor  ns per saved tensor, from libtorch alone to the whole engine offload_bench tape
//   the same for passes of 10^3 to 10^5 saved tensors
#include <cstdio>
#include <exception>
#include <string_view>

#include "benchmarks/figure.h"

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a table grows while one looks on, also through a pipe
  const std::string_view what = argc > 1 ? argv[1] : "";
  try {
    if (what == "step") return neap::bench::offload_step(argc - 2, argv + 2);
    if (what == "saved_tensor") return neap::bench::saved_tensor_cost(argc - 2, argv + 2);
    if (what == "tape") return neap::bench::tape_length(argc - 2, argv + 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "offload_bench: %s\n", error.what());
    return 1;
  }
  std::fputs("usage: offload_bench step | saved_tensor | tape\n", stderr);
  return 2;
}
