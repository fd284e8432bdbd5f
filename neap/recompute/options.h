// torch-free
// How units are run again. Start at recompute.h; the meaning of each option is written here once.
#pragma once

namespace neap::recompute {

struct Options {
  // The second run draws the random numbers that the first one drew, and leaves the generators as it found them.
  // Without it a unit with dropout gets wrong gradients, and a unit without any saves two short copies of generator
  // state.
  bool preserve_rng = true;
  // The second run ends as soon as the last tensor that backward needs is there. It ends by an exception that passes
  // through the unit's code; switch it off for code that cannot be left that way.
  bool early_stop = true;
  // Keep a copy of every tensor of the first run and compare the second run with it to the last bit: names the first
  // tensor that differs. Costs more memory than recomputation saves; early_stop is off meanwhile.
  bool debug = false;
};

}  // namespace neap::recompute
