#include "unit/counting_new.h"

#include <cstdlib>
#include <new>

namespace {
int64_t news = 0;  // tests that count are single-threaded
}

int64_t gannet_test::num_news() { return news; }

void* operator new(std::size_t n) {
  ++news;
  if (void* p = std::malloc(n > 0 ? n : 1)) return p;
  throw std::bad_alloc();
}
// Sanitizers bring their own of this one, whose memory must not meet the delete below.
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  ++news;
  return std::malloc(n > 0 ? n : 1);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
