#include "neap/train/determinism.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "neap/base/error.h"

namespace neap::train {

void set_deterministic(Deterministic choice) {
  if (choice == Deterministic::kOff) return;
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/choice == Deterministic::kWarn);
  // Otherwise empty tensors are filled with NaN: that is for programs that read memory which they have not written, and
  // would write into reloads on the wrong stream.
  context.setDeterministicFillUninitializedMemory(false);
  // cuDNN chooses its algorithms apart from the above.
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
}

bool operators_are_deterministic() { return at::globalContext().deterministicAlgorithms(); }

std::optional<std::string> nondeterministic_text(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  if (torch == nullptr) return std::nullopt;
  const std::string text = torch->what_without_backtrace();
  // torch has no type of its own for these. The second is cuBLAS's, whose text names the variable that it lacks.
  const bool named = text.find(" does not have a deterministic implementation") != std::string::npos ||
                     text.find("Deterministic behavior was enabled with") != std::string::npos;
  if (!named) return std::nullopt;
  // What follows these words tells a Python program what to do.
  const std::string reason = text.substr(0, std::min(text.find(", but you set"), text.find('\n')));
  return neap::internal::concat("[train.deterministic] expected operators with a deterministic implementation; found: ",
                                reason, "; train.deterministic: warn goes on with a warning, false without one");
}

}  // namespace neap::train
