// Uses the installed headers and libraries as a stranger would: a module of one's own, trained with and without
// offload.
#include <ATen/Functions.h>
#include <torch/nn/module.h>

#include <iostream>
#include <sstream>

#include "neap/autograd/hook_point.h"
#include "neap/base/error.h"
#include "neap/offload/engine.h"
#include "neap/trace/chrome_json.h"
#include "neap/trace/recorder.h"

namespace {

class Block : public torch::nn::Module, public neap::autograd::Hookable {
 public:
  Block() { weight_ = register_parameter("weight", at::ones({64, 64})); }

  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run({x}, [&] { return at::tanh(at::matmul(x, weight_)); });
  }

 private:
  at::Tensor weight_;
};

at::Tensor gradient(neap::offload::Engine* engine) {
  torch::nn::Module model;
  const auto block = model.register_module("block", std::make_shared<Block>());
  if (engine != nullptr) engine->attach(model, {"block"});
  const at::Tensor x = at::linspace(-1, 1, 64 * 64).view({64, 64});
  block->forward(x.requires_grad_()).sum().backward();
  return block->parameters()[0].grad();
}

}  // namespace

int main() {
  neap::trace::Recorder recorder;
  neap::offload::Engine engine({.min_bytes = neap::Bytes(0)}, {.recorder = &recorder});
  NEAP_CHECK(at::equal(gradient(&engine), gradient(nullptr)), "[consumer] gradients differ with offload");
  const auto report = engine.take_step_report();
  NEAP_CHECK(report.saved_tensors > 0, "[consumer] expected saved tensors in the report; found none");

  recorder.instant("consumer", "done", 1);
  std::ostringstream trace;
  neap::trace::write_chrome_json(recorder, trace);
  NEAP_CHECK(trace.str().find("done") != std::string::npos, "[consumer] the trace lacks its event: ", trace.str());
  std::cout << "consumer: offloaded " << report.offloaded_bytes << ", gradients equal\n";
  return 0;
}
