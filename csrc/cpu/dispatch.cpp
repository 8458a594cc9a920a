// Which of the compiled instruction sets runs: the best that the machine has, unless UNIRL_CPU_ISA names one.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "rows.h"

namespace unirl {
namespace {

Isa best_isa() {
#if defined(UNIRL_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::generic;
}

Isa named_isa(const std::string& name) {
  if (name == "generic") return Isa::generic;
  if (name == "avx2") return Isa::avx2;
  if (name == "avx512") return Isa::avx512;
  throw std::runtime_error("UNIRL_CPU_ISA=" + name + ": expected generic, avx2 or avx512");
}

}  // namespace

Isa current_isa() {
  static const Isa best = best_isa();
  const char* forced = std::getenv("UNIRL_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return best;
  const Isa isa = named_isa(forced);
  if (isa > best) throw std::runtime_error(std::string("UNIRL_CPU_ISA=") + forced + ": this machine does not have it");
  return isa;
}

const RowKernels& row_kernels(Isa isa) {
#if defined(UNIRL_X86)
  if (isa == Isa::avx512) return avx512_kernels;
  if (isa == Isa::avx2) return avx2_kernels;
#endif
  return generic_kernels;
}

}  // namespace unirl
