// The primitives of csrc/cuda/simt.h on the CPU, for tests: every thread of a cluster is a fiber, and barriers hand
// over to the next one. What the hardware leaves open is taken at its worst:
//
//   - threads run in a random order, and a block runs ahead of the others of its cluster as far as barriers let it;
//   - shared memory starts as NaN, and so does the destination of a bulk load until its barrier is waited for;
//   - a bulk store reads its source as late as the kernel allows, so that shared memory overwritten too early shows;
//   - a barrier that not all threads reach, and stores that nobody waits for, end the program with a message.
//
// Not emulated: memory order between the generic and the asynchronous proxy, and warps that diverge at a shuffle.
#pragma once

#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define UNIRL_DEVICE inline

namespace unirl {
namespace simt {

constexpr int kThreads = 64;
constexpr int kWarp = 32;

using Stream = void*;

struct alignas(16) Words {
  uint32_t w[4];
};

[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "emulated kernel: %s\n", message);
  std::abort();
}

struct Gate {
  int expected, arrived = 0;
  uint64_t generation = 0;
};

struct BulkStore {
  void* to;
  const void* from;
  int bytes;
};

struct Warp {
  Gate gate{kWarp};
  float values[2][kWarp];
};

struct Block {
  std::vector<Words> memory;
  Gate gate{kThreads};
  Warp warps[kThreads / kWarp];
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  int thread, rank, shuffles;
  bool done;
  std::deque<std::vector<BulkStore>> groups;  // committed
  std::vector<BulkStore> open;
};

// One cluster at a time runs; grids are walked through in order.
struct Machine {
  std::vector<Block> cluster;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Gate cluster_gate{0};
  ucontext_t scheduler;
  Fiber* now = nullptr;
  int64_t first_block = 0, grid = 0;
  uint64_t progress = 0;
  std::function<void()> body;
  std::mt19937 random{1};
};
inline Machine& machine() {
  static Machine one;
  return one;
}
inline Fiber& self() { return *machine().now; }
inline Block& own_block() { return machine().cluster[self().rank]; }

inline void yield() { swapcontext(&self().context, &machine().scheduler); }
inline void pass(Gate& gate) {
  const uint64_t generation = gate.generation;
  machine().progress++;
  if (++gate.arrived == gate.expected) {
    gate.arrived = 0;
    gate.generation++;
  }
  while (gate.generation == generation) yield();
}

inline int thread() { return self().thread; }
inline int64_t block() { return machine().first_block + self().rank; }
inline int64_t blocks() { return machine().grid; }
inline char* shared() { return reinterpret_cast<char*>(own_block().memory.data()); }
template <class T>
T* in_block(T* p, int rank) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(machine().cluster[rank].memory.data()) +
                              (reinterpret_cast<char*>(p) - shared()));
}
inline void block_barrier() { pass(own_block().gate); }
inline void cluster_barrier() { pass(machine().cluster_gate); }
inline float shuffle_xor(float value, int mask) {
  Warp& warp = own_block().warps[thread() / kWarp];
  float* values = warp.values[self().shuffles++ % 2];
  values[thread() % kWarp] = value;
  pass(warp.gate);
  return values[(thread() % kWarp) ^ mask];
}

inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;  // a NaN stays
}
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float max_keep_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline float max_drop_nan(float a, float b) { return std::fmax(a, b); }
inline uint32_t bfloat16_bits(float value) {
  if (value != value) return 0x7fffu;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
inline uint32_t bfloat16_pair(float low, float high) { return bfloat16_bits(low) | bfloat16_bits(high) << 16; }

inline void require_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) fail("16-byte access to an address that is not a multiple of 16");
}
inline Words read_once(const Words* p) {
  require_aligned(p);
  return *p;
}
inline void write_once(Words* p, Words v) {
  require_aligned(p);
  *p = v;
}

struct LoadBarrier {
  struct State {
    int completed = 0, expected = -1, issued = 0;
    std::vector<BulkStore> loads;
  };
  State* state;

  void init() { state = new State; }  // tests are short-lived: never freed
  void expect(int bytes) {
    if (state->expected >= 0) fail("a load barrier is armed twice in one phase");
    state->expected = bytes;
    machine().progress++;
  }
  void wait(int phase) {
    while (state->completed % 2 == phase) {
      if (state->expected >= 0 && state->issued == state->expected) deliver();
      else yield();
    }
  }
  void deliver() {
    for (const auto& load : state->loads) memcpy(load.to, load.from, load.bytes);
    *state = {state->completed + 1, -1, 0, {}};
    machine().progress++;
  }
};
inline void publish_barriers() {}
inline void require_bulk(const void* a, const void* b, int bytes) {
  require_aligned(a);
  require_aligned(b);
  if (bytes <= 0 || bytes % 16 != 0) fail("a bulk copy must be a positive multiple of 16 bytes");
}
inline void bulk_load(void* to, const void* from, int bytes, LoadBarrier& barrier) {
  require_bulk(to, from, bytes);
  memset(to, 0xff, bytes);
  barrier.state->loads.push_back({to, from, bytes});
  barrier.state->issued += bytes;
}
inline void bulk_store(void* to, const void* from, int bytes) {
  require_bulk(to, from, bytes);
  self().open.push_back({to, from, bytes});
}
inline void bulk_commit() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}
template <int kPending>
void bulk_sources_free() {
  for (; self().groups.size() > kPending; self().groups.pop_front())
    for (const auto& store : self().groups.front()) memcpy(store.to, store.from, store.bytes);
}
inline void bulk_stores_done() { bulk_sources_free<0>(); }
inline void fence_for_bulk() {}

inline void fiber_main() {
  machine().body();
  if (!self().groups.empty() || !self().open.empty()) fail("a thread ends before its bulk stores are done");
  self().done = true;
  machine().progress++;
  yield();
}

inline void start_cluster(int cluster, int shared_bytes) {
  Machine& m = machine();
  m.cluster.assign(cluster, Block());
  for (auto& block : m.cluster) {
    block.memory.resize((shared_bytes + 15) / 16);
    memset(static_cast<void*>(block.memory.data()), 0xff, block.memory.size() * sizeof(Words));
  }
  m.cluster_gate = Gate{cluster * kThreads};
  while (static_cast<int>(m.fibers.size()) < cluster * kThreads) m.fibers.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < cluster * kThreads; ++i) {
    Fiber& fiber = *m.fibers[i];
    fiber.thread = i % kThreads, fiber.rank = i / kThreads, fiber.shuffles = 0, fiber.done = false;
    fiber.stack.resize(64 * 1024);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
    makecontext(&fiber.context, fiber_main, 0);
  }
}

// Lets the threads of one block run on for as long as they can, in random order.
inline void run_block(std::vector<Fiber*>& live) {
  Machine& m = machine();
  for (uint64_t before = m.progress - 1; m.progress != before;) {
    before = m.progress;
    std::shuffle(live.begin(), live.end(), m.random);
    for (Fiber* fiber : live) {
      m.now = fiber;
      swapcontext(&m.scheduler, &fiber->context);
    }
    live.erase(std::remove_if(live.begin(), live.end(), [](Fiber* f) { return f->done; }), live.end());
  }
}

inline void run_cluster(int cluster) {
  Machine& m = machine();
  std::vector<std::vector<Fiber*>> blocks(cluster);
  for (int i = 0; i < cluster * kThreads; ++i) blocks[i / kThreads].push_back(m.fibers[i].get());
  while (!blocks.empty()) {
    const uint64_t before = m.progress;
    std::shuffle(blocks.begin(), blocks.end(), m.random);
    for (auto& live : blocks) run_block(live);
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(), [](const auto& b) { return b.empty(); }), blocks.end());
    if (m.progress == before) fail("threads wait for each other for ever");
  }
}

template <class Kernel>
void launch(int64_t grid, int cluster, int shared_bytes, Stream, const typename Kernel::Args& args) {
  Machine& m = machine();
  m.grid = grid;
  m.body = [&args] { Kernel(args).run(); };
  for (m.first_block = 0; m.first_block < grid; m.first_block += cluster) {
    start_cluster(cluster, shared_bytes);
    run_cluster(cluster);
  }
}

template <class Kernel>
int resident_clusters(int, int) {
  return 2;  // few, so that each takes several rows
}

}  // namespace simt
}  // namespace unirl
