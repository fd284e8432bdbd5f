#include "neap/autograd/saved_tensor_scope.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#include <torch/csrc/autograd/node_creation_hook.h>
#define NEAP_NODE_CREATION_HOOKS 1  // torch 2.14 and newer
#endif

#include <atomic>
#include <utility>
#include <vector>

#include "neap/autograd/node_ptr.h"
#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/base/mutex.h"

namespace neap::autograd {

namespace ag = torch::autograd;

// Constant initialisation leaves no constructor to run: reading it is one access relative to the thread pointer.
static constinit thread_local SavedTensorScope* t_innermost = nullptr;

// Forwards to the engine it was put in front of. It must not run backward itself: libtorch binds its device threads to
// the first engine that does, once per process.
class ProxyEngine final : public ag::Engine {
 public:
  explicit ProxyEngine(ag::Engine& base) : base_(base) {}

  ag::variable_list execute(const ag::edge_list& roots, const ag::variable_list& inputs, bool keep_graph,
                            bool create_graph, bool accumulate_grad, const ag::edge_list& outputs) override {
    return base_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<ag::GraphTask>& task,
                                                                 NodePtr root, ag::InputBuffer&& inputs) override {
    return base_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }

  std::unique_ptr<ag::AnomalyMetadata> make_anomaly_metadata() override { return base_.make_anomaly_metadata(); }

#ifdef NEAP_NODE_CREATION_HOOKS
  decltype(std::declval<ag::Engine&>().get_node_creation_hooks()) get_node_creation_hooks() override {
    return base_.get_node_creation_hooks();
  }
#endif

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    const SavedTensorScope* scope = t_innermost;
    if (scope == nullptr) [[likely]]
      return base_.get_default_saved_variable_hooks();
    const at::impl::SavedTensorDefaultHooksTLS& python = at::SavedTensorDefaultHooks::get_tls_state();
    // Dynamo and AOTAutograd trace with tensors that have no data.
    if (python.is_tracing) return nullptr;
    if (python.stack.size() > scope->python_depth_) return base_.get_default_saved_variable_hooks();
    return scope->policy_ == nullptr ? nullptr : scope->policy_->make_hook();
  }

 private:
  ag::Engine& base_;
};

namespace {

// The engine that is known to ask our scopes: the proxy, or an engine of someone else that forwards to it.
constinit std::atomic<const ag::Engine*> g_vetted_engine = nullptr;

// Fetched by libtorch through a plain function pointer, hence a global. Proxies are never destroyed: graphs, and
// engines put in front later, may use one until the process ends.
constinit std::atomic<ProxyEngine*> g_proxy = nullptr;
ag::Engine& proxy_stub() { return *g_proxy.load(std::memory_order_acquire); }

class ProbePolicy final : public SavedTensorPolicy {
 public:
  std::unique_ptr<SavedVariableHooks> make_hook() override { return std::make_unique<Hook>(packed); }
  bool packed = false;

 private:
  struct Hook final : SavedVariableHooks {
    explicit Hook(bool& flag) : packed(flag) {}
    void call_pack_hook(const at::Tensor& /*tensor*/) override { packed = true; }
    at::Tensor call_unpack_hook() override { return {}; }
    bool& packed;
  };
};

// Threads on which libtorch deliberately asks nobody can tell nothing about the engine.
bool can_probe() {
  return at::SavedTensorDefaultHooks::is_enabled() && !at::SavedTensorDefaultHooks::get_tls_state().is_tracing;
}

}  // namespace

// Saves one tensor below a scope of its own; true if the scope was asked. Built without the dispatcher, so that no
// mode, interpreter or device takes part.
class ScopeProbe {
 public:
  static bool reaches_us() {
    const c10::InferenceMode normal(false);  // an inference tensor cannot be saved
    const at::Tensor tensor(at::detail::empty_cpu({1}, at::kFloat));
    ProbePolicy policy;
    const SavedTensorScope scope(&policy, SavedTensorScope::NoInstall{});
    const ag::SavedVariable saved(tensor, /*is_output=*/false);
    return policy.packed;
  }
};

void install_saved_tensor_hooks() {
  static Mutex mutex;
  const MutexLock lock(mutex);
  ag::Engine& current = ag::Engine::get_default_engine();
  if (&current == g_vetted_engine.load(std::memory_order_acquire)) return;
  const bool probe = can_probe();
  // An engine that somebody put in front of our proxy and that forwards to it needs no second proxy.
  if (g_proxy.load(std::memory_order_acquire) != nullptr && probe && ScopeProbe::reaches_us()) {
    g_vetted_engine.store(&current, std::memory_order_release);
    return;
  }
  auto* proxy = g_proxy.load(std::memory_order_acquire);
  if (proxy == nullptr || &current != proxy) {
    // Reachable for ever, so that a leak checker does not take a displaced proxy for one that was lost.
    static auto& proxies = *new std::vector<std::unique_ptr<ProxyEngine>>;
    proxy = proxies.emplace_back(std::make_unique<ProxyEngine>(current)).get();
    g_proxy.store(proxy, std::memory_order_release);
    ag::set_default_engine_stub(&proxy_stub);
  }
  if (!probe) return;  // the next scope comes here again and tests then
  NEAP_ASSERT(ScopeProbe::reaches_us(), "[autograd] torch ", TORCH_VERSION,
              " did not ask for hooks when it saved a tensor; saved tensors cannot be intercepted with this version");
  g_vetted_engine.store(proxy, std::memory_order_release);
}

SavedTensorScope::SavedTensorScope(SavedTensorPolicy* policy, NoInstall /*tag*/) noexcept
    : policy_(policy), outer_(t_innermost), python_depth_(at::SavedTensorDefaultHooks::get_tls_state().stack.size()) {
  t_innermost = this;
}

SavedTensorScope::SavedTensorScope(SavedTensorPolicy* policy) : SavedTensorScope(policy, NoInstall{}) {
  // A delegating constructor has made the object: if this throws, the destructor closes the scope again.
  if (policy != nullptr && &ag::Engine::get_default_engine() != g_vetted_engine.load(std::memory_order_acquire)) {
    install_saved_tensor_hooks();
  }
}

SavedTensorScope::~SavedTensorScope() {
  if (t_innermost == this) [[likely]] {
    t_innermost = outer_;
    return;
  }
  // Keep the chain sound for the scopes that are still open.
  for (SavedTensorScope* scope = t_innermost; scope != nullptr; scope = scope->outer_) {
    if (scope->outer_ == this) scope->outer_ = outer_;
  }
  log_error(
      "[autograd] a saved-tensor scope must be closed by the thread that opened it, innermost first; found it "
      "closed out of turn; give each scope a block of its own");
}

const SavedTensorScope* SavedTensorScope::current() noexcept { return t_innermost; }

bool SavedTensorScope::python_wins() noexcept {
  const std::size_t around = t_innermost == nullptr ? 0 : t_innermost->python_depth_;
  return at::SavedTensorDefaultHooks::get_tls_state().stack.size() > around;
}

}  // namespace neap::autograd
