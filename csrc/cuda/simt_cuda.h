// The primitives of simt.h on the GPU, compute capability 9.0 and later.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#define UNIRL_DEVICE __device__ __forceinline__

namespace unirl {
namespace simt {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

using Stream = cudaStream_t;

struct alignas(16) Words {
  uint32_t w[4];
};

UNIRL_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
UNIRL_DEVICE int64_t block() { return blockIdx.x; }
UNIRL_DEVICE int64_t blocks() { return gridDim.x; }

UNIRL_DEVICE char* shared() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
UNIRL_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

template <class T>
UNIRL_DEVICE T* in_block(T* p, int rank) {
  return static_cast<T*>(__cluster_map_shared_rank(p, rank));
}

UNIRL_DEVICE void block_barrier() { __syncthreads(); }
// Not the .aligned form: lanes of a warp may arrive one after the other.
UNIRL_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
UNIRL_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

UNIRL_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
UNIRL_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
UNIRL_DEVICE float max_keep_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
UNIRL_DEVICE float max_drop_nan(float a, float b) { return fmaxf(a, b); }

// Two floats as bfloat16, to nearest even, the first in the low half.
UNIRL_DEVICE uint32_t bfloat16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

UNIRL_DEVICE Words read_once(const Words* p) {
  Words v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}
UNIRL_DEVICE void write_once(Words* p, Words v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

// Counts the bytes of bulk loads; phases alternate between 0 and 1.
struct LoadBarrier {
  uint64_t state;

  UNIRL_DEVICE void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&state)) : "memory");
  }
  UNIRL_DEVICE void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
  }
  UNIRL_DEVICE void wait(int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&state)), "r"(phase)
        : "memory");
  }
};
// Makes initialised barriers known to the copy engine.
UNIRL_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One thread issues; `expect` of the same barrier has announced the bytes.
UNIRL_DEVICE void bulk_load(void* to_shared, const void* from_global, int bytes, LoadBarrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to_shared)), "l"(from_global), "r"(bytes), "r"(shared_address(&barrier.state))
               : "memory");
}
UNIRL_DEVICE void bulk_store(void* to_global, const void* from_shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to_global), "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
}
UNIRL_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the newest kPending groups of the thread's stores have read their shared memory.
template <int kPending>
UNIRL_DEVICE void bulk_sources_free() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
UNIRL_DEVICE void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Between writing shared memory, or reading what a load will overwrite, and the barrier before the copy is issued.
UNIRL_DEVICE void fence_for_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <class Kernel>
__global__ void __launch_bounds__(kThreads, Kernel::kBlocksPerSm)
    entry(const __grid_constant__ typename Kernel::Args args) {
  Kernel(args).run();
}

template <class Kernel>
cudaLaunchConfig_t configuration(int64_t grid, int cluster, int shared_bytes, Stream stream,
                                 cudaLaunchAttribute& attribute) {
  if (shared_bytes > 48 * 1024) {
    // Asked for outright: by itself the driver may leave more to the cache than lets several blocks in.
    const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    check(cudaFuncSetAttribute(entry<Kernel>, size, shared_bytes), Kernel::kName);
    check(cudaFuncSetAttribute(entry<Kernel>, carveout, cudaSharedmemCarveoutMaxShared), Kernel::kName);
  }
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

template <class Kernel>
void launch(int64_t grid, int cluster, int shared_bytes, Stream stream, const typename Kernel::Args& args) {
  if (grid == 0) return;
  cudaLaunchAttribute attribute = {};
  const auto config = configuration<Kernel>(grid, cluster, shared_bytes, stream, attribute);
  check(cudaLaunchKernelEx(&config, entry<Kernel>, args), Kernel::kName);
}

// Clusters of this size that the current device holds at a time; the driver is asked once.
template <class Kernel>
int resident_clusters(int cluster, int shared_bytes) {
  static std::mutex lock;
  static std::map<std::array<int, 3>, int> known;
  int device = 0;
  check(cudaGetDevice(&device), Kernel::kName);
  const std::lock_guard<std::mutex> guard(lock);
  int& clusters = known[{device, cluster, shared_bytes}];
  if (clusters > 0) return clusters;
  cudaLaunchAttribute attribute = {};
  const auto config = configuration<Kernel>(cluster, cluster, shared_bytes, nullptr, attribute);
  check(cudaOccupancyMaxActiveClusters(&clusters, entry<Kernel>, &config), Kernel::kName);
  if (clusters == 0) throw std::runtime_error(std::string(Kernel::kName) + ": does not fit on this device");
  return clusters;
}

}  // namespace simt
}  // namespace unirl
