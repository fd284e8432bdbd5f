#include "benchmarks/counting_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "neap/comm/internal/exchange.h"

namespace neap::bench {
namespace {

class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& get() {
    static auto* const allocator = new CountingAllocator();
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    void* block = std::aligned_alloc(kHeader, (bytes + 2 * kHeader - 1) / kHeader * kHeader);
    if (block == nullptr) throw std::bad_alloc();
    std::memcpy(block, &bytes, sizeof bytes);
    const int64_t now = live_ += static_cast<int64_t>(bytes);
    for (int64_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
    void* data = static_cast<char*>(block) + kHeader;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = live_.load(); }

 private:
  static constexpr std::size_t kHeader = 64;

  static void release(void* data) {
    if (data == nullptr) return;
    void* block = static_cast<char*>(data) - kHeader;
    std::size_t bytes;
    std::memcpy(&bytes, block, sizeof bytes);
    get().live_ -= static_cast<int64_t>(bytes);
    std::free(block);
  }

  std::atomic<int64_t> live_{0}, peak_{0};
};

}  // namespace
}  // namespace neap::bench

using neap::bench::CountingAllocator;

void neap_count_cpu_tensors(void) { c10::SetCPUAllocator(&CountingAllocator::get(), /*priority=*/100); }
int64_t neap_live_bytes(void) { return CountingAllocator::get().live(); }
int64_t neap_peak_bytes(void) { return CountingAllocator::get().peak(); }
void neap_reset_peak_bytes(void) { CountingAllocator::get().reset_peak(); }
int64_t neap_reduction_scratch(int ranks) { return 2 * (ranks - 1) * neap::comm::internal::Exchange::kChunk; }
