// The proxy in front of the autograd engine: put there once, put back when it was displaced, not stacked without need.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>

#include <thread>
#include <vector>

#include "neap/autograd/saved_tensor_scope.h"
#include "neap/autograd/test_support.h"
#include "neap/base/scope_exit.h"

namespace neap::autograd::testing {
namespace {

namespace ag = torch::autograd;

// True if a scope on this thread is asked when a tensor is saved.
bool scopes_work() {
  RecordingPolicy policy;
  const SavedTensorScope scope(&policy);
  at::ones({2}).set_requires_grad(true).sin();
  return policy.log().packed == 1;
}

TEST(EngineInstall, HappensOnceHoweverManyThreadsAsk) {
  std::vector<std::thread> threads;
  std::vector<ag::Engine*> seen(4);
  for (ag::Engine*& engine : seen) {
    threads.emplace_back([&engine] {
      install_saved_tensor_hooks();
      engine = &ag::Engine::get_default_engine();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ag::Engine* engine : seen) EXPECT_EQ(engine, seen[0]);
  EXPECT_NE(seen[0], &ag::Engine::get_base_engine());
  EXPECT_TRUE(scopes_work());
}

// What `import torch` does when it comes after us.
class LaterEngine : public ag::Engine {
 public:
  std::unique_ptr<ag::SavedVariableHooks> get_default_saved_variable_hooks() override {
    ++asked;
    return nullptr;
  }
  int asked = 0;
};

LaterEngine* g_later = nullptr;
ag::Engine& later_stub() { return *g_later; }

TEST(EngineInstall, ADisplacedProxyIsReplacedByTheNextScope) {
  install_saved_tensor_hooks();
  g_later = new LaterEngine;  // engines are never destroyed
  ag::set_default_engine_stub(&later_stub);
  EXPECT_TRUE(scopes_work());
  EXPECT_NE(&ag::Engine::get_default_engine(), g_later);
  // Without a scope, the engine that came later is asked.
  g_later->asked = 0;
  at::ones({2}).set_requires_grad(true).sin();
  EXPECT_EQ(g_later->asked, 1);
  ag::Engine* const proxy = &ag::Engine::get_default_engine();
  install_saved_tensor_hooks();
  EXPECT_EQ(&ag::Engine::get_default_engine(), proxy);
}

// Another library that does what we do.
class ForwardingEngine final : public ag::Engine {
 public:
  explicit ForwardingEngine(ag::Engine& base) : base_(base) {}
  std::unique_ptr<ag::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return base_.get_default_saved_variable_hooks();
  }

 private:
  ag::Engine& base_;
};

ForwardingEngine* g_forwarding = nullptr;
ag::Engine& forwarding_stub() { return *g_forwarding; }
ag::Engine* g_ours = nullptr;
ag::Engine& our_stub() { return *g_ours; }

TEST(EngineInstall, AnEngineThatForwardsToTheProxyIsAccepted) {
  install_saved_tensor_hooks();
  g_ours = &ag::Engine::get_default_engine();
  g_forwarding = new ForwardingEngine(*g_ours);
  ag::set_default_engine_stub(&forwarding_stub);
  const ScopeExit restore([] { ag::set_default_engine_stub(&our_stub); });
  EXPECT_TRUE(scopes_work());
  EXPECT_TRUE(scopes_work());
  EXPECT_EQ(&ag::Engine::get_default_engine(), g_forwarding);
}

}  // namespace
}  // namespace neap::autograd::testing
