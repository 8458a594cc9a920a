// Which kernel with how many blocks: from tasks to launches.
#include "rows.h"

#include <stdexcept>

#include "gradient_kernel.h"
#include "policy_kernel.h"
#include "record_kernel.h"
#include "scale_kernel.h"
#include "token_kernel.h"

namespace unirl {
namespace cuda {
namespace {

// Blocks of write_gradient that keep a large device busy for a few turns, and the least that one is worth starting for.
constexpr int64_t kManyBlocks = 4096;
constexpr int64_t kLeastVectors = 4 * simt::kThreads;
// Shared memory of a block where three, two or one of them share a multiprocessor of 228 KiB, 1 KiB of each reserved.
constexpr int kRooms[] = {228 * 1024 / 3 - 1024, 228 * 1024 / 2 - 1024, 227 * 1024};

simt::Stream stream_of(StreamHandle handle) { return static_cast<simt::Stream>(handle); }

// Blocks of write_gradient for a row, a power of two: more while there are few rows and enough in each.
int64_t parts_of(const Logits& logits) {
  const int64_t vectors = logits.columns * (logits.bfloat16 ? 2 : 4) / static_cast<int64_t>(sizeof(Words));
  int64_t parts = 1;
  while (logits.rows * parts < kManyBlocks && vectors >= 2 * parts * kLeastVectors) parts *= 2;
  return parts;
}

// How a row lies in the shared memory of a cluster.
struct Room {
  int cluster;
  int vectors;
  int shared_bytes;
  bool fits;
};

template <class Element>
Room room_in(int64_t columns, int cluster, int limit) {
  const int64_t vectors = columns / Codec<Element>::kPer;
  const int64_t share = vectors == 0 ? 1 : (vectors + cluster - 1) / cluster;
  const int64_t bytes = PolicyKernel<Element>::kControlBytes + share * static_cast<int64_t>(sizeof(Words));
  return {cluster, static_cast<int>(share), static_cast<int>(bytes), bytes <= limit};
}

// The smallest cluster that leaves room for three blocks on a multiprocessor, else for two, else for one; the largest
// where none holds such a row. It depends on nothing but the columns, and so does the order of additions.
template <class Element>
Room room_for(int64_t columns) {
  for (const int limit : kRooms) {
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
      const Room room = room_in<Element>(columns, cluster, limit);
      if (room.fits) return room;
    }
  }
  return room_in<Element>(columns, kMaxCluster, 0);
}

template <class Element>
void record_rows_of(const RecordTask& task, simt::Stream stream) {
  const int cluster = room_for<Element>(task.logits.columns).cluster;
  const RecordArgs args = {task, ExponentScale(task.temperature), cluster};
  simt::launch<RecordKernel<Element>>(task.logits.rows * cluster, cluster, sizeof(Exchange), stream, args);
}

template <class Element>
void gradient_rows_of(const GradientTask& task, simt::Stream stream) {
  const int parts = static_cast<int>(parts_of(task.logits));
  const GradientArgs args = {task, ExponentScale(task.temperature), parts};
  simt::launch<GradientKernel<Element>>(task.logits.rows * parts, 1, sizeof(Coefficients), stream, args);
}

template <class Element>
void policy_rows_of(const PolicyTask& task, simt::Stream stream) {
  const Logits& logits = task.record.logits;
  const Room room = room_for<Element>(logits.columns);
  if (!room.fits) throw std::runtime_error("policy_rows: a row is larger than a cluster's shared memory");
  const PolicyArgs args = {task.record, loss_of(task.loss), task.terms,  task.result,
                           ExponentScale(task.record.temperature), room.cluster, room.vectors};
  const int64_t resident = simt::resident_clusters<PolicyKernel<Element>>(room.cluster, room.shared_bytes);
  const int64_t clusters = logits.rows < resident ? logits.rows : resident;
  simt::launch<PolicyKernel<Element>>(clusters * room.cluster, room.cluster, room.shared_bytes, stream, args);
}

}  // namespace

void record_rows(const RecordTask& task, StreamHandle stream) {
  task.logits.bfloat16 ? record_rows_of<uint16_t>(task, stream_of(stream))
                       : record_rows_of<float>(task, stream_of(stream));
}

void gradient_rows(const GradientTask& task, StreamHandle stream) {
  task.logits.bfloat16 ? gradient_rows_of<uint16_t>(task, stream_of(stream))
                       : gradient_rows_of<float>(task, stream_of(stream));
}

void token_losses(const TokenTask& task, StreamHandle stream) {
  const TokenArgs args = {loss_of(task.loss), task.rows, task.terms, task.result};
  const int64_t blocks = (task.rows + simt::kThreads - 1) / simt::kThreads;
  simt::launch<TokenKernel>(blocks, 1, 0, stream_of(stream), args);
}

void policy_rows(const PolicyTask& task, StreamHandle stream) {
  if (task.record.logits.rows == 0) return;
  task.record.logits.bfloat16 ? policy_rows_of<uint16_t>(task, stream_of(stream))
                              : policy_rows_of<float>(task, stream_of(stream));
}

void scale_gradient(const Logits& logits, const float* factor, StreamHandle stream) {
  const ScaleArgs args = {logits, factor};
  const int64_t blocks = logits.rows < kManyBlocks ? logits.rows : kManyBlocks;
  logits.bfloat16 ? simt::launch<ScaleKernel<uint16_t>>(blocks, 1, 0, stream_of(stream), args)
                  : simt::launch<ScaleKernel<float>>(blocks, 1, 0, stream_of(stream), args);
}

bool row_fits(int64_t columns, bool bfloat16) {
  return (bfloat16 ? room_for<uint16_t>(columns) : room_for<float>(columns)).fits;
}

}  // namespace cuda
}  // namespace unirl
