// The first of the three passes: each row of logits to its record. A cluster of blocks shares a row, as many as in the
// single-read kernel whatever the number of rows: a row's record is then the same, bit for bit, in every batch.
#pragma once

#include "lane_sums.h"

namespace unirl {

struct RecordArgs {
  RecordTask task;
  ExponentScale scale;
  int cluster;
};

template <class Element>
struct RecordKernel {
  using Args = RecordArgs;
  static constexpr const char* kName = "row_records";
  static constexpr int kBlocksPerSm = 5;

  const Args& args;

  UNIRL_DEVICE explicit RecordKernel(const Args& args_) : args(args_) {}

  UNIRL_DEVICE void run() {
    const RecordTask& task = args.task;
    const int rank = static_cast<int>(simt::block() % args.cluster);
    const int64_t row = simt::block() / args.cluster, rows = task.logits.rows, target = task.targets[row];
    const DeviceScale scale(args.scale);
    Exchange& exchange = *reinterpret_cast<Exchange*>(simt::shared());
    simt::cluster_barrier();  // the others' shared memory is there

    const Element* data = row_of<Element>(task.logits, row);
    const float own = target < 0 ? 0.0f : Codec<Element>::load(data + target);
    LaneSums sums;
    if (target != kUnread) sums = sums_of_share(row, rank, scale);
    sums = merge_cluster(sums, scale, exchange, 0, rank, args.cluster);
    if (rank == 0 && simt::thread() == 0)
      write_record(sums.record(scale, task.temperature, target, own), task.record + row, rows, task.with_shift);
    // Nobody writes into another block's shared memory after the cluster barrier: blocks may end in any order.
  }

  UNIRL_DEVICE LaneSums sums_of_share(int64_t row, int rank, const DeviceScale& scale) const {
    const Span<Element> span(row_of<Element>(args.task.logits, row), args.task.logits.columns);
    LaneSums sums;
    if (rank == 0 && simt::thread() < span.edges())
      add_one(Codec<Element>::load(span.data + span.edge_column(simt::thread())), scale, sums);
    add_vectors<Element>(
        share_of(span.vectors, rank, args.cluster), [&](int v) { return simt::read_once(span.vector(v)); }, scale,
        sums);
    return sums;
  }
};

}  // namespace unirl
