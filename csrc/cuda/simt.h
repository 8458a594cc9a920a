// The few primitives that the CUDA kernels use beyond plain C++, in namespace unirl::simt:
//
//   thread, block, kThreads, kWarp        place of the running thread; blocks are one-dimensional, kThreads wide
//   shared                                dynamic shared memory of the block
//   in_block(pointer, rank)               the same shared variable in another block of the cluster
//   block_barrier, cluster_barrier        of all threads; the second also publishes writes into other blocks
//   shuffle_xor                           the value of another lane of the warp, all lanes converged
//   exp2_fast, max_keep_nan, max_drop_nan exp2 flushes subnormal results to 0; the maxima differ in what a NaN does
//   fused                                 a * b + c, rounded once
//   read_once, write_once                 16 bytes of global memory that nobody needs again
//   LoadBarrier, bulk_load, bulk_store    asynchronous copies between global and shared memory, multiples of 16 bytes
//   launch, resident_clusters             from the host
//
// Two implementations: the GPU's own instructions, and fibers on the CPU, with which the tests run the kernels' source.
#pragma once

#if defined(__CUDACC__)
#include "simt_cuda.h"
#else
#include "../emulation/simt_emulated.h"
#endif
