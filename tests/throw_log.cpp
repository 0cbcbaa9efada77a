// Preloaded into test programs by scripts/checks-reached: writes the text of every gannet::Error that is thrown to the
// file that THROW_LOG names, and throws it as ever.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <typeinfo>

extern "C" void __cxa_throw(void* object, std::type_info* type, void (*destroy)(void*)) {
  using Throw = void (*)(void*, std::type_info*, void (*)(void*));
  static const auto next = reinterpret_cast<Throw>(dlsym(RTLD_NEXT, "__cxa_throw"));
  if (std::strcmp(type->name(), "N6gannet2v05ErrorE") == 0) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const char* path = std::getenv("THROW_LOG");
    if (std::FILE* file = path != nullptr ? std::fopen(path, "a") : nullptr) {
      std::fprintf(file, "%s\n", static_cast<std::runtime_error*>(object)->what());
      std::fclose(file);
    }
  }
  next(object, type, destroy);
  std::abort();
}
