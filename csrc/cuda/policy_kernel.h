// The single-read kernel: a row of logits lives in the shared memory of a cluster of blocks while its statistics, its
// loss and its gradient are computed; global memory is read once and written once.
//
// Every block holds its share of the row in chunks. A chunk is loaded by the copy engine, summed as it arrives, turned
// into the gradient in place once the cluster has agreed on the row's record, stored by the copy engine, and refilled
// with the next row as soon as the store has read it: loads, arithmetic and stores of neighbouring rows overlap.
#pragma once

#include "lane_sums.h"

namespace unirl {

struct PolicyArgs {
  RecordTask record;  // logits overwritten
  PolicyLoss loss;
  const double* terms;
  double* result;
  ExponentScale scale;
  int cluster;
  int vectors;  // room of a block, 16 bytes each
};

template <class Element>
struct PolicyKernel {
  using Args = PolicyArgs;
  static constexpr const char* kName = "policy_rows";
  static constexpr int kBlocksPerSm = 3;
  static constexpr int kChunk = kGroupVectors;
  static constexpr int kMaxChunks = (227 * 1024 / 16 + kChunk - 1) / kChunk;

  struct Shared {
    simt::LoadBarrier loaded[kMaxChunks];
    Exchange exchange;
    Coefficients coefficients;
  };
  static constexpr int kControlBytes = (sizeof(Shared) + 127) / 128 * 128;

  const Args& args;
  const DeviceScale scale;
  const int rank, chunks;
  Shared& shared;
  Words* const buffer;
  int turn = 0;  // rows that this block has been through

  UNIRL_DEVICE explicit PolicyKernel(const Args& args_)
      : args(args_),
        scale(args_.scale),
        rank(static_cast<int>(simt::block() % args_.cluster)),
        chunks((args_.vectors + kChunk - 1) / kChunk),
        shared(*reinterpret_cast<Shared*>(simt::shared())),
        buffer(reinterpret_cast<Words*>(simt::shared() + kControlBytes)) {}

  // A row as this block sees it: the share of its vectors that it holds.
  struct Row {
    int64_t index, target;
    Span<Element> span;
    Range held;
  };

  UNIRL_DEVICE void run() {
    if (simt::thread() == 0) {
      for (int c = 0; c < chunks; ++c) shared.loaded[c].init();
      simt::publish_barriers();
    }
    simt::cluster_barrier();  // the others' shared memory is there
    Row row = next_read(simt::block() / args.cluster);
    if (simt::thread() == 0 && exists(row))
      for (int c = 0; c < chunks; ++c) load(row, c);
    for (; exists(row); ++turn) {
      // Read before the cluster barrier in sums_of: after it, the owner of a column may write its gradient.
      const float edge = edge_logit(row), own = own_logit(row);
      settle(row, sums_of(row, edge), own);
      const Row next = next_read(row.index + simt::blocks() / args.cluster);
      write_gradient(row, next, edge);
      row = next;
    }
    if (simt::thread() == 0) simt::bulk_stores_done();
  }

  UNIRL_DEVICE bool exists(const Row& row) const { return row.index < args.record.logits.rows; }

  // The first row from `index` on, in steps of the grid, that is to be read; those before it are finished here.
  UNIRL_DEVICE Row next_read(int64_t index) const {
    const Logits& logits = args.record.logits;
    const int64_t step = simt::blocks() / args.cluster;
    while (index < logits.rows && args.record.targets[index] == kUnread) {
      write_zeros(row_of<Element>(logits, index), logits.width, rank, args.cluster);
      if (rank == 0 && simt::thread() == 0) leave_out(index);
      index += step;
    }
    const int64_t at = index < logits.rows ? index : 0;
    const Span<Element> span(row_of<Element>(logits, at), logits.columns);
    return {index, args.record.targets[at], span, share_of(span.vectors, rank, args.cluster)};
  }

  UNIRL_DEVICE Range chunk_of(const Row& row, int chunk) const {
    const int first = row.held.first + chunk * kChunk, last = first + kChunk;
    return {first < row.held.last ? first : row.held.last, last < row.held.last ? last : row.held.last};
  }
  UNIRL_DEVICE Words& held(const Row& row, int vector) const { return buffer[vector - row.held.first]; }

  // Thread 0. Every chunk of every row goes through its barrier, so that all phases stay in step.
  UNIRL_DEVICE void load(const Row& row, int chunk) const {
    const Range range = chunk_of(row, chunk);
    const int bytes = range.count() * static_cast<int>(sizeof(Words));
    shared.loaded[chunk].expect(bytes);
    if (bytes > 0) simt::bulk_load(&held(row, range.first), row.span.vector(range.first), bytes, shared.loaded[chunk]);
  }

  // The few columns outside the vectors stay in registers of the first block.
  UNIRL_DEVICE bool has_edge(const Row& row) const { return rank == 0 && simt::thread() < row.span.edges(); }
  UNIRL_DEVICE float edge_logit(const Row& row) const {
    return has_edge(row) ? Codec<Element>::load(row.span.data + row.span.edge_column(simt::thread())) : -INFINITY;
  }

  UNIRL_DEVICE float own_logit(const Row& row) const {
    return simt::thread() == 0 && row.target >= 0 ? Codec<Element>::load(row.span.data + row.target) : 0.0f;
  }

  // Sums of the whole row, right in thread 0 of every block.
  UNIRL_DEVICE LaneSums sums_of(const Row& row, float edge) const {
    LaneSums sums;
    if (has_edge(row)) add_one(edge, scale, sums);
    for (int c = 0; c < chunks; ++c) {
      shared.loaded[c].wait(turn % 2);
      add_vectors<Element>(chunk_of(row, c), [&](int v) { return held(row, v); }, scale, sums);
    }
    return merge_cluster(sums, scale, shared.exchange, turn, rank, args.cluster);
  }

  // Thread 0 of the first block.
  UNIRL_DEVICE void write(int64_t index, const RowRecord& record, const TokenLoss& token) const {
    const int64_t rows = args.record.logits.rows;
    write_record(record, args.record.record + index, rows, args.record.with_shift);
    write_result(token, args.result + index, rows);
  }
  UNIRL_DEVICE void leave_out(int64_t index) const {
    write(index, {-INFINITY, 0.0, -INFINITY, 0.0}, {1.0, 0.0, 0.0, false, false, false});
  }

  // Every block computes what its gradient needs.
  UNIRL_DEVICE void settle(const Row& row, const LaneSums& sums, float own) const {
    if (simt::thread() == 0) {
      const RowRecord record = sums.record(scale, args.record.temperature, row.target, own);
      const PolicyRow policy = policy_row(args.loss, record, args.record.temperature, args.terms + row.index,
                                          args.record.logits.rows);
      if (rank == 0) write(row.index, record, policy.token);
      shared.coefficients.set(policy.gradient, row.target, own);
    }
    simt::block_barrier();
  }

  // Chunk by chunk over the row in shared memory and out; the next row comes in one chunk behind.
  UNIRL_DEVICE void write_gradient(const Row& row, const Row& next, float edge) const {
    const Coefficients coefficients = shared.coefficients;
    if (has_edge(row)) {
      const int column = row.span.edge_column(simt::thread());
      const float entry = column == row.target ? coefficients.own : coefficients.of(edge, scale);
      Codec<Element>::store(row.span.data + column, coefficients.silent ? 0.0f : entry);
    }
    const Logits& logits = args.record.logits;
    write_zeros(row.span.data + logits.columns, logits.width - logits.columns, rank, args.cluster);
    for (int c = 0; c < chunks; ++c) {
      const Range range = chunk_of(row, c);
      for (int v = range.first + simt::thread(); v < range.last; v += simt::kThreads) {
        Words& words = held(row, v);
        words = coefficients.silent ? Words{{0, 0, 0, 0}} : coefficients.of<Element>(words, scale);
      }
      simt::fence_for_bulk();
      simt::block_barrier();
      if (simt::thread() != 0) continue;
      store(row, range, coefficients);
      if (c > 0) refill<1>(next, c - 1);
    }
    if (simt::thread() == 0) refill<0>(next, chunks - 1);
  }

  // Thread 0. The target's entry goes in last: its own formula would only slow the loop down.
  UNIRL_DEVICE void store(const Row& row, Range range, const Coefficients& coefficients) const {
    const int column = static_cast<int>(row.target) - row.span.head;
    if (row.target >= row.span.head && range.first * Span<Element>::kPer <= column &&
        column < range.last * Span<Element>::kPer) {
      Element* first = reinterpret_cast<Element*>(&held(row, range.first));
      Codec<Element>::store(first + (column - range.first * Span<Element>::kPer), coefficients.own);
      simt::fence_for_bulk();
    }
    const int bytes = range.count() * static_cast<int>(sizeof(Words));
    if (bytes > 0) simt::bulk_store(row.span.vector(range.first), &held(row, range.first), bytes);
    simt::bulk_commit();
  }

  template <int kPending>
  UNIRL_DEVICE void refill(const Row& next, int chunk) const {
    if (!exists(next)) return;
    simt::bulk_sources_free<kPending>();
    load(next, chunk);
  }
};

}  // namespace unirl
