// torch-free
#pragma once

#include <chrono>

namespace gloo {

// By pointer only; an inline member of ProcessGroupGloo names setTimeout().
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
