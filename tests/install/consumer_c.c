/* Headers that C can include, together with C++ in one program. */
#include <gannet/c_api.h>

const char* version_seen_by_c(void) { return gannet_check_abi() == GANNET_OK ? gannet_version() : gannet_last_error(); }
