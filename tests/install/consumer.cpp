// Uses what an engine would: errors across the library's boundary, a context with a pool, a plan and a run.
#include <gannet/gannet.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

extern "C" const char* version_seen_by_c(void);

int main(int argc, char** argv) {
  if (argc != 2 || std::strcmp(argv[1], gannet::version()) != 0 || std::strcmp(argv[1], version_seen_by_c()) != 0) {
    std::fprintf(stderr, "version is %s and %s\n", gannet::version(), version_seen_by_c());
    return 1;
  }
  gannet::ThreadPool pool({.num_threads = 2});
  const gannet::Context context{.executor = &pool};

  try {
    gannet::run_once(context, gannet::TopK{}, {.impl = "no such implementation"});
    std::fprintf(stderr, "nothing was thrown\n");
    return 1;
  } catch (const gannet::Error& e) {
    if (std::string(e.what()).find("[topk]") != 0) {
      std::fprintf(stderr, "unexpected text: %s\n", e.what());
      return 1;
    }
  }

  const std::vector<float> logits = {0.5f, 2.0f, -1.0f, 2.0f, 1.0f, 0.0f, 3.0f, 0.0f};  // [2, 4]
  const std::vector<int32_t> lens = {4, 3};
  std::vector<int32_t> positions(2 * 2);
  std::vector<int32_t> counts(2);
  const gannet::TopK topk{.logits = gannet::view(logits.data(), {2, 4}),
                          .lens = gannet::view(lens.data(), {2}),
                          .positions = gannet::view(positions.data(), {2, 2}),
                          .counts = gannet::view(counts.data(), {2})};
  gannet::run_once(context, topk);
  const std::vector<int32_t> expected = {1, 3, 0, 2};
  if (positions != expected) {
    std::fprintf(stderr, "positions are %d %d %d %d\n", positions[0], positions[1], positions[2], positions[3]);
    return 1;
  }
  std::printf("consumer of gannet %s: ok\n", gannet::version());
  return 0;
}
