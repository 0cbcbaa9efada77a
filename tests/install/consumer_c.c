/* The header that C shares. */
#include <gannet/version.h>

const char* version_seen_by_c(void) { return gannet_version(); }
