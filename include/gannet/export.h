// The one macro that makes a symbol visible. Everything else is hidden (-fvisibility=hidden).
#pragma once

#define GANNET_API __attribute__((visibility("default")))
