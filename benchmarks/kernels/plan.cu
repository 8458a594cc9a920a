// How csrc/cuda launches its kernels, as JSON: rows and columns from the command line. Runs without a GPU.
#include "../../csrc/cuda/rows.cu"

#include <cstdio>
#include <cstdlib>

namespace {

template <class Element>
void print(const char* dtype, int64_t rows, int64_t columns) {
  using namespace unirl;
  using namespace unirl::cuda;
  const Logits logits = {nullptr, rows, columns, columns, columns, sizeof(Element) == 2};
  const Room room = room_for<Element>(columns);
  std::printf(
      "{\"dtype\": \"%s\", \"rows\": %lld, \"columns\": %lld, \"threads\": %d, "
      "\"gradient_parts\": %lld, \"cluster\": %d, \"policy_vectors\": %d, \"policy_shared\": %d, "
      "\"record_shared\": %zu, \"gradient_shared\": %zu}\n",
      dtype, static_cast<long long>(rows), static_cast<long long>(columns), simt::kThreads,
      static_cast<long long>(parts_of(logits)), room.cluster, room.vectors, room.shared_bytes, sizeof(Exchange),
      sizeof(Coefficients));
}

}  // namespace

int main(int count, char** arguments) {
  for (int i = 1; i + 1 < count; i += 2) {
    print<uint16_t>("bfloat16", std::atoll(arguments[i]), std::atoll(arguments[i + 1]));
    print<float>("float32", std::atoll(arguments[i]), std::atoll(arguments[i + 1]));
  }
}
