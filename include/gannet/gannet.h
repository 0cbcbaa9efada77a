// Everything: one include for those who do not mind.
#pragma once

#include "gannet/attention.h"
#include "gannet/context.h"
#include "gannet/device.h"
#include "gannet/dtype.h"
#include "gannet/error.h"
#include "gannet/executor.h"
#include "gannet/kv_cache.h"
#include "gannet/kv_pool.h"
#include "gannet/layer_gate.h"
#include "gannet/memory.h"
#include "gannet/op_plan.h"
#include "gannet/ops.h"
#include "gannet/page_table.h"
#include "gannet/step.h"
#include "gannet/tensor.h"
#include "gannet/version.h"
