/* Gannet for C (C99), and for every language that can call C. The same operations, pools and backends as in C++, from
   the same libraries. gannet/ops.h and gannet/attention.h say what each argument means, docs/c_api.md how to begin.

     gannet_context* context = NULL;
     gannet_context_create(NULL, &context);
     gannet_topk args = {.op = {sizeof args, GANNET_OP_TOPK}, .logits = ..., .lens = ..., ...};
     gannet_plan* plan = NULL;
     if (gannet_plan_create(context, &args.op, NULL, &plan) != GANNET_OK) puts(gannet_last_error());

   Statuses: whatever can fail returns a gannet_status. gannet_last_error() has the text: function, argument, its value,
   what is accepted. No C++ exception leaves the library, nothing is printed, nothing aborts.

   Structs that may grow begin with struct_size: set it to sizeof of the struct, and the rest, by an initialiser, to
   what is wanted and else to 0. A library that is newer than the caller's header takes what the header knew; an older
   one takes it as long as the fields that it does not know are 0. Structs without struct_size never change. Names of
   fields are those in the texts of errors; "out" marks what a function fills.

   Enums are int32_t with named values; any other value is refused.

   Handles are made by *_create and given back by *_free, which takes the address of the variable and makes it NULL: a
   second call does nothing, and NULL is fine. A plan or a backend keeps what it needs of its context, so these may be
   freed in any order. Memory that a view points to is never kept alive.

   Threads: a text is of the thread that made the call. A plan may be run by several threads, each with its own
   workspace, if the context's executor allows that; everything else is used by one thread at a time, the gate excepted.

   Tensors: "bf16 [rows, H, R]" means data of that dtype and shape, with any strides of which the last is 1. An input is
   never written to. rank 0 means absent. */
#ifndef GANNET_C_API_H_
#define GANNET_C_API_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "gannet/export.h"
#include "gannet/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- statuses and versions --------------------------------------------------------------------------------------- */

typedef int32_t gannet_status;
enum {
  GANNET_OK = 0,
  GANNET_INVALID_ARGUMENT = 1, /* a value, shape, dtype, stride or order of calls that the function does not accept */
  GANNET_UNSUPPORTED = 2,      /* valid, but no implementation here takes it */
  GANNET_OUT_OF_MEMORY = 3,    /* memory or cache pages */
  GANNET_DEVICE = 4,           /* a device, the operating system or a callback reported a failure */
  GANNET_CORRUPT_FILE = 5,     /* named so that both interfaces count alike; nothing here reads files */
  GANNET_INTERNAL = 6          /* an error of the library itself: please report it */
};

/* "ok", "invalid argument", ...; "unknown" for another number. */
GANNET_API const char* gannet_status_name(gannet_status status);

/* What the last call that failed on this thread said; "" where none has. Valid until the next one that fails. */
GANNET_API const char* gannet_last_error(void);

/* Of this header. Rises when something here changes in a way that programs built before do not survive. */
#define GANNET_C_ABI 1

/* Fails where the library that is linked is not of the ABI of the header that this was compiled with. */
#define gannet_check_abi() gannet_check_abi_of(GANNET_C_ABI)
GANNET_API gannet_status gannet_check_abi_of(int32_t abi);

/* ---- devices and tensors ----------------------------------------------------------------------------------------- */

typedef int32_t gannet_device_kind;
enum { GANNET_CPU = 0, GANNET_CUDA = 1 };

typedef struct gannet_device {
  gannet_device_kind kind;
  int32_t index;
} gannet_device;

typedef int32_t gannet_dtype;
enum {
  GANNET_F32 = 0,
  GANNET_BF16 = 1,
  GANNET_F16 = 2, /* named so that it can be refused by name */
  GANNET_E4M3 = 3,
  GANNET_U8 = 4,
  GANNET_I32 = 5,
  GANNET_I64 = 6
};

/* A view of memory that somebody else owns; strides count elements. */
typedef struct gannet_tensor {
  void* data;
  gannet_dtype dtype;
  int32_t rank; /* 0: absent; at most 4 */
  int64_t shape[4];
  int64_t stride[4];
  gannet_device device;
} gannet_tensor;

/* Row-major views in host memory. */
static inline gannet_tensor gannet_tensor_3d(const void* data, gannet_dtype dtype, int64_t n0, int64_t n1, int64_t n2) {
  gannet_tensor t = {(void*)data, dtype, 3, {n0, n1, n2, 0}, {n1 * n2, n2, 1, 0}, {GANNET_CPU, 0}};
  return t;
}
static inline gannet_tensor gannet_tensor_2d(const void* data, gannet_dtype dtype, int64_t n0, int64_t n1) {
  gannet_tensor t = {(void*)data, dtype, 2, {n0, n1, 0, 0}, {n1, 1, 0, 0}, {GANNET_CPU, 0}};
  return t;
}
static inline gannet_tensor gannet_tensor_1d(const void* data, gannet_dtype dtype, int64_t n0) {
  gannet_tensor t = {(void*)data, dtype, 1, {n0, 0, 0, 0}, {1, 0, 0, 0}, {GANNET_CPU, 0}};
  return t;
}

/* ---- contexts: who runs the work --------------------------------------------------------------------------------- */

/* Runs task `task`, from 0, as worker `worker`. */
typedef void (*gannet_task)(void* data, int64_t task, int32_t worker);

/* Your threads. parallel_for calls task(data, t, w) exactly once for every t in [0, num_tasks), with w in [0,
   num_workers) and no two calls at a time with the same w, and returns GANNET_OK when all have returned. It is not
   called from inside a task. Tasks that it left out, or numbers outside these bounds, are an error (GANNET_DEVICE). */
typedef struct gannet_executor {
  size_t struct_size;
  void* user;
  int32_t num_workers; /* at least 1; no result depends on it */
  gannet_status (*parallel_for)(void* user, int64_t num_tasks, gannet_task task, void* data);
} gannet_executor;

/* Your memory. allocate returns NULL where there is none; alignment is a power of two; deallocate gets the same values.
   Called at creation, growth and destruction, never by a run that was planned. `user` must outlive what was made. */
typedef struct gannet_memory {
  size_t struct_size;
  void* user;
  gannet_device device;
  void* (*allocate)(void* user, size_t bytes, size_t alignment);
  void (*deallocate)(void* user, void* p, size_t bytes, size_t alignment);
} gannet_memory;

typedef int32_t gannet_log_level;
enum { GANNET_LOG_TRACE = 0, GANNET_LOG_DEBUG = 1, GANNET_LOG_INFO = 2, GANNET_LOG_WARNING = 3 };

typedef struct gannet_context_options {
  size_t struct_size;
  const gannet_executor* executor; /* copied; NULL: see num_threads */
  int32_t num_threads;             /* 0: work runs on the calling thread; n: in a pool of n, the caller included; -1: of
                                      as many as the process may run on. Not together with an executor. */
  void (*log)(void* user, gannet_log_level level, const char* text); /* NULL: silent */
  void* log_user;
  int32_t no_overlap; /* 0 or 1: what is made from the context sets no kernel up on a CUDA device while the one before
                         it on the stream ends (Stream::overlap of gannet/device.h); the same bits either way */
} gannet_context_options;

typedef struct gannet_context gannet_context;

/* options may be NULL: everything on the calling thread. */
GANNET_API gannet_status gannet_context_create(const gannet_context_options* options, gannet_context** out);
GANNET_API void gannet_context_free(gannet_context** context);

/* ---- caches and page tables: views of what you own --------------------------------------------------------------- */

typedef int32_t gannet_latent_format; /* docs/kv_layouts.md has every byte */
enum {
  GANNET_LATENT_F32 = 0,
  GANNET_LATENT_BF16 = 1,
  GANNET_LATENT_E4M3 = 2, /* one scale for the tensor */
  GANNET_LATENT_PACKED656 = 3,
  GANNET_LATENT_E4M3_PER_TOKEN = 4
};

typedef int32_t gannet_index_k_format;
enum { GANNET_INDEX_K_F32 = 0, GANNET_INDEX_K_BF16 = 1, GANNET_INDEX_K_E4M3 = 2 };

typedef int32_t gannet_scale_format;
enum { GANNET_SCALE_FP32 = 0, GANNET_SCALE_POWER_OF_TWO = 1 };

/* The latent rows of one layer: a row lies at data + page * page_stride_bytes + offset * bytes of a row. */
typedef struct gannet_latent_cache {
  size_t struct_size;
  void* data;
  gannet_latent_format format;
  int32_t latent_dim; /* R, kv_lora_rank: 512 */
  int32_t rope_dim;   /* P: 64 */
  int32_t page_size;  /* tokens */
  int64_t num_pages;
  int64_t page_stride_bytes;
  float scale; /* GANNET_LATENT_E4M3 only: finite and positive */
  gannet_device device;
  int64_t row_stride_bytes; /* from a token's row to the next; 0: they lie one behind the other */
} gannet_latent_cache;

/* The index keys of one layer. */
typedef struct gannet_index_cache {
  size_t struct_size;
  void* data;
  gannet_index_k_format format;
  gannet_scale_format scale_format;
  int32_t head_dim; /* Di: 128 */
  int32_t page_size;
  int64_t num_pages;
  int64_t page_stride_bytes;
  gannet_device device;
  int32_t hadamard; /* 0 or 1: keys are kept rotated by gannet_hadamard */
} gannet_index_cache;

/* The caches of one layer; index is NULL for a layer without an indexer. */
typedef struct gannet_layer {
  const gannet_latent_cache* latent;
  const gannet_index_cache* index;
} gannet_layer;

typedef int32_t gannet_page_table_form;
enum { GANNET_PAGES_PADDED = 0, GANNET_PAGES_CSR = 1 };

/* Position p of request i lies in page table(i, p / page_size) at offset p % page_size. */
typedef struct gannet_page_table {
  size_t struct_size;
  gannet_page_table_form form;
  gannet_tensor pages;       /* padded: int32 [table_rows, max_pages] */
  gannet_tensor row_indices; /* padded, optional: int32 [num_requests], the table row of each request; absent: row i */
  gannet_tensor indptr;      /* CSR: int32 [num_requests + 1] */
  gannet_tensor indices;     /* CSR: int32 [n] */
} gannet_page_table;

static inline gannet_page_table gannet_pages_padded(gannet_tensor pages) {
  gannet_page_table t;
  memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  t.form = GANNET_PAGES_PADDED;
  t.pages = pages;
  return t;
}
static inline gannet_page_table gannet_pages_csr(gannet_tensor indptr, gannet_tensor indices) {
  gannet_page_table t;
  memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  t.form = GANNET_PAGES_CSR;
  t.indptr = indptr;
  t.indices = indices;
  return t;
}

/* What an entry L of seq_lens means: how many keys row j of a request's S rows sees. */
typedef int32_t gannet_row_bound;
enum {
  GANNET_CAUSAL_FULL = 0,       /* max(0, L - (S - 1) + j): L counts this step's tokens */
  GANNET_CAUSAL_FROM_FIRST = 1, /* L + j */
  GANNET_UNIFORM_BLOCK = 2      /* L */
};

typedef struct gannet_query_rows {
  gannet_tensor seq_lens;  /* int32 [num_requests], tokens; 0 and less: no keys */
  gannet_tensor cu_q_lens; /* optional int32 [num_requests + 1], cumulative rows per request, from 0 */
  int32_t q_len;           /* rows per request where cu_q_lens is absent: at least 1 */
  gannet_row_bound bound;
} gannet_query_rows;

/* ---- operations -------------------------------------------------------------------------------------------------- */

typedef int32_t gannet_op_kind;
enum {
  GANNET_OP_LATENT_WRITE = 1,
  GANNET_OP_LATENT_GATHER = 2,
  GANNET_OP_INDEX_K_WRITE = 3,
  GANNET_OP_INDEX_K_GATHER = 4,
  GANNET_OP_ROPE = 5,
  GANNET_OP_RAGGED_PREFILL = 6,
  GANNET_OP_MERGE_STATE = 7,
  GANNET_OP_MLA_DECODE = 8,
  GANNET_OP_INDEX_LOGITS = 9,
  GANNET_OP_TOPK = 10,
  GANNET_OP_INDEX_SELECT = 11,
  GANNET_OP_SPARSE_ATTENTION = 12
};

/* What the arguments of every operation begin with. */
typedef struct gannet_op {
  size_t struct_size; /* of the arguments */
  gannet_op_kind kind;
} gannet_op;

/* Scatters latent rows, converted to the cache's format. */
typedef struct gannet_latent_write {
  gannet_op op;
  gannet_tensor latent; /* fp32 or bf16 [rows, R] */
  gannet_tensor rope;   /* same dtype [rows, P], rotated */
  gannet_tensor slots;  /* int32 or int64 [rows]; negative: the row is skipped */
  const gannet_latent_cache* cache;
} gannet_latent_write;

/* Gathers and dequantises latent rows; a negative slot gives zeros. */
typedef struct gannet_latent_gather {
  gannet_op op;
  gannet_tensor slots; /* int32 or int64 [rows] */
  const gannet_latent_cache* cache;
  gannet_tensor latent; /* out, fp32 or bf16 [rows, R] */
  gannet_tensor rope;   /* out, same dtype [rows, P] */
} gannet_latent_gather;

/* Quantises and scatters index keys. */
typedef struct gannet_index_k_write {
  gannet_op op;
  gannet_tensor k;     /* fp32 or bf16 [rows, Di] */
  gannet_tensor slots; /* int32 or int64 [rows]; negative: the row is skipped */
  const gannet_index_cache* cache;
  int32_t hadamard; /* 0 or 1: k is rotated; as the cache says, else refused */
} gannet_index_k_write;

/* Gathers and dequantises index keys; a negative slot gives zeros. */
typedef struct gannet_index_k_gather {
  gannet_op op;
  gannet_tensor slots; /* int32 or int64 [rows] */
  const gannet_index_cache* cache;
  gannet_tensor k;  /* out, fp32 or bf16 [rows, Di] */
  int32_t hadamard; /* 0 or 1: k comes rotated; as the cache says, else refused */
} gannet_index_k_gather;

typedef int32_t gannet_rope_pairing;
enum {
  GANNET_ROPE_INTERLEAVED = 0, /* pairs (2i, 2i+1) */
  GANNET_ROPE_HALF_SPLIT = 1   /* pairs (i, i+P/2) */
};

/* Rotates x[..., offset : offset + P] in place. */
typedef struct gannet_rope {
  gannet_op op;
  gannet_tensor x;         /* in/out, fp32 or bf16 [rows, heads, width] */
  gannet_tensor positions; /* int32 [rows] */
  gannet_tensor cos_sin;   /* fp32 [max_positions, P]: P/2 cosines, then P/2 sines */
  int32_t offset;
  gannet_rope_pairing pairing;
} gannet_rope;

/* Attention in the expanded form over ragged batches. */
typedef struct gannet_ragged_prefill {
  gannet_op op;
  gannet_tensor q;          /* fp32 or bf16 [q_rows, H, N+P] */
  gannet_tensor k;          /* same dtype [kv_rows, H, N+P], or [kv_rows, H, N] with k_rope */
  gannet_tensor k_rope;     /* optional, same dtype [kv_rows, P] */
  gannet_tensor v;          /* same dtype [kv_rows, H, V] */
  gannet_tensor cu_q_lens;  /* int32 [B+1] */
  gannet_tensor cu_kv_lens; /* int32 [B+1] */
  gannet_tensor out;        /* out, fp32 or bf16 [q_rows, H, V] */
  gannet_tensor lse;        /* out, optional fp32 [q_rows, H], natural logarithm */
  float softmax_scale;
  int32_t causal; /* 0 or 1; lower right: query a of nq sees key b of nk iff b <= a + (nk - nq) */
} gannet_ragged_prefill;

typedef int32_t gannet_lse_base;
enum { GANNET_LSE_NATURAL = 0, GANNET_LSE_TWO = 1 };

/* Merges two partial results in place into side a. */
typedef struct gannet_merge_state {
  gannet_op op;
  gannet_tensor out_a;   /* in/out, fp32 or bf16 [rows, H, D] */
  gannet_tensor lse_a;   /* in/out, fp32 [rows, H] */
  gannet_tensor out_b;   /* same dtype as out_a [rows, H, D] */
  gannet_tensor lse_b;   /* fp32 [rows, H] */
  gannet_tensor count_a; /* optional int32 [rows]: keys behind side a of each row */
  gannet_tensor count_b; /* optional int32 [rows] */
  gannet_lse_base base;
} gannet_merge_state;

/* Absorbed attention over the paged latent cache. */
typedef struct gannet_mla_decode {
  gannet_op op;
  gannet_tensor q; /* fp32 or bf16 [rows, H, R+P]; or e4m3, where the cache is e4m3 too */
  const gannet_latent_cache* cache;
  const gannet_page_table* pages;
  gannet_query_rows rows;
  gannet_tensor attn_sink;  /* optional fp32 [H], in units of the scores: a key without a value that every row sees */
  gannet_tensor out;        /* out, fp32 or bf16 [rows, H, R] */
  gannet_tensor lse;        /* out, optional fp32 [rows, H], natural logarithm, without the sink */
  gannet_tensor max_logits; /* out, optional fp32 [rows, H] */
  float softmax_scale;
  float q_scale; /* of an e4m3 query; 0 or 1 for others */
} gannet_mla_decode;

/* Indexer scores: sum over index heads of weights * relu(q . k). */
typedef struct gannet_index_logits {
  gannet_op op;
  gannet_tensor q;       /* fp32, bf16 or e4m3 [rows, Hi, Di] */
  gannet_tensor weights; /* fp32 [rows, Hi], with Di^-0.5, Hi^-0.5 and the scale of an e4m3 query in them */
  const gannet_index_cache* cache;
  const gannet_page_table* pages;
  gannet_query_rows rows;
  gannet_tensor logits; /* out, fp32 or bf16 [rows, max_keys]; columns that a row does not see are left alone */
  int32_t hadamard;     /* 0 or 1: q is rotated; as the cache says, else refused */
} gannet_index_logits;

/* Exact top-k; NaN ranks last, the smaller position first among equals. */
typedef struct gannet_topk {
  gannet_op op;
  gannet_tensor logits;    /* fp32 or bf16 [rows, max_keys] */
  gannet_tensor lens;      /* int32 [rows]: leading columns that count */
  gannet_tensor positions; /* out, int32 [rows, k], ascending, then -1 */
  gannet_tensor counts;    /* out, int32 [rows] */
} gannet_topk;

/* Index logits, top-k and the translation to slots in one pass. */
typedef struct gannet_index_select {
  gannet_op op;
  gannet_tensor q;       /* as of gannet_index_logits */
  gannet_tensor weights; /* fp32 [rows, Hi] */
  const gannet_index_cache* cache;
  const gannet_page_table* pages;
  gannet_query_rows rows;
  int64_t max_seq_len;          /* no row sees more keys than this; sizes the workspace */
  gannet_tensor topk_slots;     /* out, int32 [rows, k], -1 behind the last */
  gannet_tensor topk_lens;      /* out, int32 [rows] */
  gannet_tensor topk_positions; /* out, optional int32 [rows, k] */
  int32_t hadamard;             /* 0 or 1: q is rotated; as the cache says, else refused */
} gannet_index_select;

/* Absorbed attention of each row over a list of slots. */
typedef struct gannet_sparse_attention {
  gannet_op op;
  gannet_tensor q; /* as of gannet_mla_decode */
  const gannet_latent_cache* cache;
  gannet_tensor topk_slots; /* int32 [rows, k] */
  gannet_tensor topk_lens;  /* optional int32 [rows] */
  gannet_tensor attn_sink;  /* optional fp32 [H] */
  gannet_tensor out;        /* out, fp32 or bf16 [rows, H, R] */
  gannet_tensor lse;        /* out, optional fp32 [rows, H], natural logarithm */
  gannet_tensor max_logits; /* out, optional fp32 [rows, H] */
  float softmax_scale;
  float q_scale;
} gannet_sparse_attention;

typedef struct gannet_plan_options {
  size_t struct_size;
  const char* impl;        /* name of the implementation to force; NULL or "": the first that takes the arguments */
  int32_t batch_invariant; /* 1: only implementations whose rows do not depend on the batch, bit for bit */
} gannet_plan_options;

typedef struct gannet_plan gannet_plan;

/* Checks shapes, dtypes, strides, devices and options, and picks the implementation. Data pointers may be null. options
   may be NULL. */
GANNET_API gannet_status gannet_plan_create(gannet_context* context, const gannet_op* args,
                                            const gannet_plan_options* options, gannet_plan** out);
GANNET_API void gannet_plan_free(gannet_plan** plan);

/* Name of the implementation that runs, for as long as the process runs; NULL for NULL. */
GANNET_API const char* gannet_plan_impl(const gannet_plan* plan);
/* Scratch that gannet_plan_run needs, on the device of the arguments; its contents never matter. 0 for NULL. */
GANNET_API size_t gannet_plan_workspace_bytes(const gannet_plan* plan);

/* Runs; allocates nothing. Arguments of the same kind, shapes, dtypes, strides and options as planned, with whatever
   pointers and contents. stream: the caller's cudaStream_t on CUDA devices, NULL on the CPU, where the work has been
   done on return. */
GANNET_API gannet_status gannet_plan_run(const gannet_plan* plan, const gannet_op* args, void* workspace,
                                         size_t workspace_bytes, void* stream);

/* Plans, allocates a workspace and runs, on the CPU: for a single call. */
GANNET_API gannet_status gannet_run_once(gannet_context* context, const gannet_op* args,
                                         const gannet_plan_options* options);

typedef struct gannet_implementation {
  size_t struct_size;
  const char* op;
  const char* name;
  gannet_device_kind device;
  int32_t runs_here;
  int32_t batch_invariant;
} gannet_implementation;

/* Called once for each; what `info` points to is valid during the call. */
typedef void (*gannet_visit_implementation)(void* user, const gannet_implementation* info);

/* Every implementation of every operation, in order of preference. */
GANNET_API gannet_status gannet_list_implementations(gannet_visit_implementation visit, void* user);

/* ---- pools: for those who have no pages of their own ------------------------------------------------------------- */

typedef struct gannet_pool_sizes {
  size_t struct_size;
  int64_t token_bytes;        /* of one layer */
  int64_t page_bytes;         /* page_size * token_bytes */
  int64_t page_stride_bytes;  /* from one page to the next */
  int64_t layer_stride_bytes; /* from one layer to the next */
  int64_t total_bytes;
} gannet_pool_sizes;

typedef struct gannet_latent_pool_options {
  size_t struct_size;
  int32_t num_layers;
  gannet_latent_format format;
  int32_t latent_dim; /* 512 */
  int32_t rope_dim;   /* 64 */
  int64_t num_pages;  /* page 0, which is never handed out, included */
  int32_t page_size;
  float scale;               /* GANNET_LATENT_E4M3: finite and positive; else 0 */
  int64_t page_stride_bytes; /* 0: the page's bytes, rounded up */
  gannet_device device;      /* where memory is NULL */
} gannet_latent_pool_options;

typedef struct gannet_index_k_pool_options {
  size_t struct_size;
  const int32_t* layers; /* that have an indexer, ascending */
  int32_t num_layers;    /* entries of layers */
  gannet_index_k_format format;
  gannet_scale_format scale_format;
  int32_t head_dim; /* 128 */
  int64_t num_pages;
  int64_t page_stride_bytes; /* 0: the page's bytes, rounded up */
  int32_t page_size;
  gannet_device device; /* where memory is NULL */
  int32_t hadamard;     /* 0 or 1: keys are kept rotated, for the life of the pool */
} gannet_index_k_pool_options;

typedef struct gannet_latent_pool gannet_latent_pool;
typedef struct gannet_index_k_pool gannet_index_k_pool;

/* Arithmetic only. `out` has its struct_size set. */
GANNET_API gannet_status gannet_latent_pool_sizes_of(const gannet_latent_pool_options* options, gannet_pool_sizes* out);
GANNET_API gannet_status gannet_index_k_pool_sizes_of(const gannet_index_k_pool_options* options,
                                                      gannet_pool_sizes* out);

/* memory may be NULL: that of the device in the options. */
GANNET_API gannet_status gannet_latent_pool_create(const gannet_latent_pool_options* options,
                                                   const gannet_memory* memory, gannet_latent_pool** out);
GANNET_API void gannet_latent_pool_free(gannet_latent_pool** pool);
GANNET_API gannet_status gannet_index_k_pool_create(const gannet_index_k_pool_options* options,
                                                    const gannet_memory* memory, gannet_index_k_pool** out);
GANNET_API void gannet_index_k_pool_free(gannet_index_k_pool** pool);

/* The caches of a layer, valid while the pool lives. `out` has its struct_size set, and gets what it has room for. */
GANNET_API gannet_status gannet_latent_pool_layer(const gannet_latent_pool* pool, int32_t layer,
                                                  gannet_latent_cache* out);
GANNET_API gannet_status gannet_index_k_pool_layer(const gannet_index_k_pool* pool, int32_t layer,
                                                   gannet_index_cache* out);

/* Who has which page. References are counted: pages that two lists share go back with the second one. */
typedef struct gannet_page_allocator gannet_page_allocator;
typedef struct gannet_page_list gannet_page_list;

/* Pages 0 .. num_pages - 1, of which page 0 is never handed out. */
GANNET_API gannet_status gannet_page_allocator_create(int64_t num_pages, gannet_page_allocator** out);
/* Lists outlive their allocator. */
GANNET_API void gannet_page_allocator_free(gannet_page_allocator** allocator);
/* -1 for NULL. */
GANNET_API int64_t gannet_page_allocator_num_free(const gannet_page_allocator* allocator);

/* `count` pages in the order of their tokens, or GANNET_OUT_OF_MEMORY and none. */
GANNET_API gannet_status gannet_page_list_acquire(gannet_page_allocator* allocator, int64_t count,
                                                  gannet_page_list** out);
/* Further references to pages [begin, begin + count) of a list: a prefix that two requests have in common. */
GANNET_API gannet_status gannet_page_list_share(const gannet_page_list* list, int64_t begin, int64_t count,
                                                gannet_page_list** out);
/* Moves the pages of *tail to the end of the list and frees *tail. Both come from the same allocator; else nothing is
   changed. */
GANNET_API gannet_status gannet_page_list_append(gannet_page_list* list, gannet_page_list** tail);
/* Gives back all but the first `count`. */
GANNET_API gannet_status gannet_page_list_truncate(gannet_page_list* list, int64_t count);
/* Gives them all back. */
GANNET_API void gannet_page_list_free(gannet_page_list** list);
/* The page numbers, valid until the list changes; *count of them. NULL and 0 for NULL. */
GANNET_API const int32_t* gannet_page_list_ids(const gannet_page_list* list, int64_t* count);

/* Pages and tokens copied within a pool, one after the other, and pages that travel as bytes (docs/kv_layouts.md,
   "Exported pages"): latent rows and index keys of every layer given, together. The buffer is host memory; caches may
   lie on a CUDA device, where the copies are made in the order of the stream and are done on return; else stream is
   NULL. */
typedef struct gannet_move {
  int32_t from;
  int32_t to;
} gannet_move;
GANNET_API gannet_status gannet_copy_pages(const gannet_layer* layers, int32_t num_layers, const gannet_move* moves,
                                           int64_t num_moves, void* stream);
GANNET_API gannet_status gannet_copy_slots(const gannet_layer* layers, int32_t num_layers, const gannet_move* moves,
                                           int64_t num_moves, void* stream);
/* What two pools must have in common for the pages of a layer to travel as bytes. */
typedef struct gannet_page_layout {
  size_t struct_size;
  int32_t page_size;
  gannet_latent_format latent_format;
  int32_t latent_dim;
  int32_t rope_dim;
  float latent_scale; /* 0 but for GANNET_LATENT_E4M3 */
  int32_t has_index;
  int64_t latent_page_bytes;
  gannet_index_k_format index_format;
  gannet_scale_format index_scale_format;
  int32_t index_head_dim;
  int32_t index_hadamard;
  int64_t index_page_bytes; /* 0 without an index cache */
} gannet_page_layout;
/* Of a layer; `out` has its struct_size set. */
GANNET_API gannet_status gannet_page_layout_of(const gannet_layer* layer, gannet_page_layout* out);
/* 1 where everything but struct_size is the same; 0 also where one is NULL. */
GANNET_API int32_t gannet_page_layouts_equal(const gannet_page_layout* a, const gannet_page_layout* b);
/* *out: the bytes that num_pages pages of these layers take. */
GANNET_API gannet_status gannet_exported_bytes(const gannet_layer* layers, int32_t num_layers, int64_t num_pages,
                                               int64_t* out);
/* buffer_bytes is exactly gannet_exported_bytes. */
GANNET_API gannet_status gannet_export_pages(const gannet_layer* layers, int32_t num_layers, const int32_t* pages,
                                             int64_t num_pages, void* buffer, size_t buffer_bytes, void* stream);
GANNET_API gannet_status gannet_import_pages(const gannet_layer* layers, int32_t num_layers, const int32_t* pages,
                                             int64_t num_pages, const void* buffer, size_t buffer_bytes, void* stream);

/* ---- beside the operations --------------------------------------------------------------------------------------- */

/* Several KV heads, as independent problems over views of the same memory (gannet/kv_heads.h). kv_head_of: head
   `kv_head` of a pool that holds num_kv_heads rows a token, one behind the other; `pool` has the geometry of one head
   and the page stride of all; `out` has its struct_size set. head_group_of: heads [group * H / num_groups, (group + 1)
   * H / num_groups) of [rows, H], [rows, H, width] or, with one dimension, [H]; absent stays absent. */
GANNET_API gannet_status gannet_kv_head_of(const gannet_latent_cache* pool, int32_t num_kv_heads, int32_t kv_head,
                                           gannet_latent_cache* out);
GANNET_API gannet_status gannet_head_group_of(const gannet_tensor* t, int32_t num_groups, int32_t group,
                                              gannet_tensor* out);

/* to = from times the Walsh-Hadamard matrix of the last dimension, a power of two up to 1,024, divided by its square
   root: its own inverse. fp32 or bf16, of equal shape, on one device; they may be the same. On a CUDA device it is
   enqueued on the stream; else stream is NULL. Index queries and keys of caches with `hadamard` are rotated so. */
GANNET_API gannet_status gannet_hadamard(const gannet_context* context, const gannet_tensor* from,
                                         const gannet_tensor* to, void* stream);

/* Which layers have an indexer and which use the selection of an earlier one, as a model's config says it. Lists hold
   "F" or "full", "S" or "shared" for each layer; NULL: absent. indexer_types goes before index_topk_pattern, and that
   before the numbers. */
typedef struct gannet_index_sharing {
  size_t struct_size;
  int64_t num_hidden_layers;
  const char* const* indexer_types;
  int64_t num_indexer_types; /* at least num_hidden_layers; more are for MTP layers */
  const char* const* index_topk_pattern;
  int64_t num_index_topk_pattern;
  int64_t index_topk_freq;            /* 0 and 1: every layer is full; else layer l is shared unless it divides
                                         max(l - offset + 1, 0) */
  int64_t index_skip_topk_offset;     /* looked at where the next field is 1; else 2 */
  int32_t has_index_skip_topk_offset; /* 0 or 1 */
} gannet_index_sharing;
/* sources[l], of num_hidden_layers entries: the layer whose selection layer l uses, itself where it has an indexer. */
GANNET_API gannet_status gannet_selection_sources(const gannet_index_sharing* sharing, int32_t* sources);

/* ---- page tables that batches share ------------------------------------------------------------------------------ */

/* The page table and the lengths of a batch of decode requests, where the kernels read them, shared by several captured
   batches: those of a target and of its draft, of one backend or of several (gannet/shared_page_table.h).

     gannet_shared_page_table_create(&options, NULL, &table);
     gannet_backend_capture_shared(target, &shape_of_target, table);
     gannet_backend_capture_shared(draft, &shape_of_draft, table);
     each step, in either order:
       gannet_shared_page_table_refresh(table, step, seq_lens, n, &pages, stream, NULL);  the second one does nothing
       gannet_backend_refresh_shared(target, &its_step);
       gannet_backend_refresh_shared(draft, &its_step); */
typedef struct gannet_shared_page_table gannet_shared_page_table;

typedef struct gannet_shared_page_table_options {
  size_t struct_size;
  int32_t num_requests; /* at least 1, those included that pad a smaller batch */
  int32_t page_size;
  int64_t max_seq_len;  /* tokens of a request at most, drafts included */
  int64_t num_pages;    /* of the pool: pages are checked against it; 0: not checked */
  int32_t lookahead;    /* tokens beyond its length for which a request has pages: what drafts of a step reach */
  gannet_device device; /* where memory is NULL */
} gannet_shared_page_table_options;

/* Of generation 0, all requests padding. memory may be NULL: that of the device in the options. */
GANNET_API gannet_status gannet_shared_page_table_create(const gannet_shared_page_table_options* options,
                                                         const gannet_memory* memory, gannet_shared_page_table** out);
/* A backend keeps the table that it captured a batch with, until it is bound anew or freed. */
GANNET_API void gannet_shared_page_table_free(gannet_shared_page_table** table);

/* Makes the table that of `generation`, a number of the caller's that grows from step to step: copies the lengths of up
   to num_requests requests (the others are padding) and of each the pages that min(length + lookahead, max_seq_len)
   needs; both lie in host memory and are done with on return. Where the table is of that generation already nothing is
   looked at. *copied, unless NULL: 1 where it copied, else 0. An error leaves the table as it was. Not for a graph. */
GANNET_API gannet_status gannet_shared_page_table_refresh(gannet_shared_page_table* table, uint64_t generation,
                                                          const int32_t* seq_lens, int64_t num_seq_lens,
                                                          const gannet_page_table* pages, void* stream,
                                                          int32_t* copied);
/* Makes it that of a greater generation with what is, or will be when the stream comes there, in its tensors. */
GANNET_API gannet_status gannet_shared_page_table_mark(gannet_shared_page_table* table, uint64_t generation);
/* 0 for NULL. */
GANNET_API uint64_t gannet_shared_page_table_generation(const gannet_shared_page_table* table);
/* Its memory, for kernels of your own; either may be NULL. seq_lens: int32 [num_requests], 0: padding; pages: int32
   [num_requests, columns], as gannet_pages_padded takes it. */
GANNET_API gannet_status gannet_shared_page_table_tensors(const gannet_shared_page_table* table,
                                                          gannet_tensor* seq_lens, gannet_tensor* pages);

/* ---- backends: a step at a time, a layer at a time --------------------------------------------------------------- */

typedef int32_t gannet_arch;
enum { GANNET_ARCH_MLA = 0, GANNET_ARCH_DSA = 1 };

typedef struct gannet_backend_config {
  size_t struct_size;
  gannet_arch arch;
  int32_t num_heads;        /* query heads of this process, H */
  int32_t latent_dim;       /* R: 512 */
  int32_t rope_dim;         /* P: 64 */
  int32_t qk_nope_head_dim; /* N; dense prefill only */
  int32_t v_head_dim;       /* V; dense prefill only */
  int32_t q_lora_rank;      /* 0: absent, which DSA refuses */
  float softmax_scale;      /* always given: (N+P)^-0.5, times what YaRN adds */
  float logit_soft_cap;     /* any value but 0 is refused */
  int32_t index_num_heads;  /* Hi; these three: DSA only */
  int32_t index_head_dim;   /* Di: 128 */
  int32_t index_topk;       /* tokens that a sparse layer attends to */
  int32_t page_size;
  int64_t max_context_len;
  int64_t prefix_chunk_capacity; /* tokens of a prefix that are expanded at a time; 0: 32,768 */
  gannet_device device;
  const gannet_plan_options* plan; /* for every operation; may be NULL */
} gannet_backend_config;

typedef struct gannet_backend gannet_backend;

/* name: "mla", "dsa", or NULL for the one that serves arch. memory, for its scratch, may be NULL: that of the device in
   the config. */
GANNET_API gannet_status gannet_backend_create(gannet_context* context, const gannet_backend_config* config,
                                               const char* name, const gannet_memory* memory, gannet_backend** out);
GANNET_API void gannet_backend_free(gannet_backend** backend);
/* NULL for NULL. */
GANNET_API const char* gannet_backend_name(const gannet_backend* backend);

/* What a backend can do; ask this, not its name. */
typedef struct gannet_capabilities {
  size_t struct_size;
  int32_t dense_prefill;   /* 0 or 1 */
  int32_t attend_all;      /* 0 or 1 */
  int32_t attend_sparse;   /* 0 or 1: select, and attend over a selection */
  uint32_t latent_formats; /* bit GANNET_LATENT_x is set: bind takes it */
  int32_t num_page_sizes;
  const int32_t* page_sizes; /* valid while the backend lives */
} gannet_capabilities;
GANNET_API gannet_status gannet_backend_capabilities(const gannet_backend* backend, gannet_capabilities* out);

/* The implementation that each operation used so far ran on. */
GANNET_API gannet_status gannet_backend_implementations(const gannet_backend* backend,
                                                        gannet_visit_implementation visit, void* user);

/* The caches of layers 0, 1, ...; replaces earlier ones and ends the current step. */
GANNET_API gannet_status gannet_backend_bind(gannet_backend* backend, const gannet_layer* layers, int32_t num_layers);

/* The stream of a CUDA device on which everything that follows is enqueued; NULL, the default stream, at first. */
GANNET_API gannet_status gannet_backend_set_stream(gannet_backend* backend, void* stream);

typedef int32_t gannet_layer_record;
enum {
  GANNET_RECORD_WRITTEN = 0,  /* the rows of all extend requests are in the caches of the layer */
  GANNET_RECORD_ABANDONED = 1 /* the step has ended without them */
};

/* Called around the rows of a layer, on the thread that called the backend. Either may be NULL. A status other than
   GANNET_OK makes the call that led to it fail with that status, and with the text of gannet_last_error where the hook
   itself got an error from here. */
typedef struct gannet_layer_hooks {
  size_t struct_size;
  void* user;
  /* Exactly once a layer a prefill step (extend or mixed). What it returns for ABANDONED is dropped. */
  gannet_status (*record)(void* user, int32_t layer, gannet_layer_record record);
  /* Before the backend touches the bytes of a layer's caches: returns once they are there. See gannet_gate. */
  gannet_status (*wait)(void* user, int32_t layer);
} gannet_layer_hooks;
/* hooks may be NULL: none. Ends the current step. */
GANNET_API gannet_status gannet_backend_set_layer_hooks(gannet_backend* backend, const gannet_layer_hooks* hooks);

/* Extend requests (prefill) come first, then those that decode; rows of all tensors likewise. The arrays are read
   during the call only. */
typedef struct gannet_step {
  size_t struct_size;
  const int32_t* seq_lens;    /* [num_requests], tokens, this step's included; of decode requests decode_bound says */
  int64_t num_requests;       /* 0: an idle step */
  const int32_t* prefix_lens; /* [num_extends]: tokens in the cache before this step */
  const int32_t* extend_lens; /* [num_extends]: new tokens; prefix + extend = seq_len */
  int64_t num_extends;
  int32_t q_len; /* rows of each decode request: at least 1 where there is one */
  gannet_row_bound decode_bound;
  const gannet_page_table* pages; /* int32 in host memory; NULL for an idle step only */
} gannet_step;

/* Plans a step; calls other than this are errors after an idle step and after an error here. */
GANNET_API gannet_status gannet_backend_prepare(gannet_backend* backend, const gannet_step* step);

/* A batch of decode requests for which a plan is made once and refreshed in place. */
typedef struct gannet_capture_shape {
  size_t struct_size;
  int32_t num_requests; /* at least 1, those included that pad a smaller batch */
  int32_t q_len;
  gannet_row_bound decode_bound;
  int64_t max_seq_len; /* 0: max_context_len */
} gannet_capture_shape;
GANNET_API gannet_status gannet_backend_capture(gannet_backend* backend, const gannet_capture_shape* shape);
/* Like prepare, into the plan captured for (num_requests, step->q_len): a decode step of up to num_requests. */
GANNET_API gannet_status gannet_backend_refresh(gannet_backend* backend, const gannet_step* step, int32_t num_requests);

/* The same with lengths and pages of a shared table; one table a shape, for good. */
GANNET_API gannet_status gannet_backend_capture_shared(gannet_backend* backend, const gannet_capture_shape* shape,
                                                       const gannet_shared_page_table* table);
typedef struct gannet_shared_step {
  size_t struct_size;
  const gannet_shared_page_table* table;
  uint64_t generation; /* that the step belongs to: the table's now, and as long as the step is used */
  int32_t q_len;       /* rows of each request: at least 1 */
  gannet_row_bound decode_bound;
  gannet_tensor seq_lens; /* optional int32 [num_requests] on the table's device, instead of the table's own */
  int32_t steps;          /* added to each length, 0 stays 0: a draft's later steps */
} gannet_shared_step;
/* On a CUDA device lengths and pages are read there, in the order of the stream, by one kernel that may be captured
   into a graph in front of the layers; lens_known of gannet_backend_step is 0 then. Calls after the table is of another
   generation fail: the step is stale. */
GANNET_API gannet_status gannet_backend_refresh_shared(gannet_backend* backend, const gannet_shared_step* step);

/* A later step of a draft, one row a request: lengths seq_lens[r] + steps, counted from the step that was prepared,
   refreshed or captured last. */
typedef struct gannet_draft {
  size_t struct_size;
  int32_t steps;
  const int32_t* seq_lens; /* [num_seq_lens]; NULL: the lengths of that step */
  int64_t num_seq_lens;
  const gannet_page_table* pages; /* NULL, unless a length reaches beyond the pages of that step */
} gannet_draft;
GANNET_API gannet_status gannet_backend_advance(gannet_backend* backend, const gannet_draft* draft);

/* After speculative verify: the row that each request goes on from, and its tokens then (narrow_rows and
   narrow_seq_lens of gannet/step.h). accepted: [num_accepted], one for each decode request; rows and seq_lens:
   [num_requests], either may be NULL. */
GANNET_API gannet_status gannet_backend_narrow(const gannet_backend* backend, const int32_t* accepted,
                                               int64_t num_accepted, int32_t* rows, int32_t* seq_lens,
                                               int64_t num_requests);

typedef int32_t gannet_step_mode;
enum { GANNET_STEP_IDLE = 0, GANNET_STEP_EXTEND = 1, GANNET_STEP_DECODE = 2, GANNET_STEP_MIXED = 3 };

/* The plan of the current step; pointers are valid until the next one. */
typedef struct gannet_step_info {
  size_t struct_size;
  gannet_step_mode mode;
  int32_t q_len;
  int64_t num_requests;
  int64_t num_extends;
  int64_t num_rows;           /* the prefill rows come first */
  int64_t num_prefill_rows;   /* of the extend requests */
  int64_t num_prefix_chunks;  /* gannet_backend_prefix_chunk */
  int64_t max_row_len;        /* keys that any row sees at most */
  const int32_t* seq_lens;    /* [num_requests]: all tokens of a request after this step */
  const int32_t* cu_rows;     /* [num_requests + 1]: cumulative rows */
  const int32_t* positions;   /* [num_rows]: for RoPE; of padding 0 */
  const int32_t* write_slots; /* [num_rows]: where the rows are written; of padding -1 */
  const int32_t* row_lens;    /* [num_rows]: keys that a row sees */
  int32_t lens_known; /* 0: lengths are on the device alone (gannet_backend_refresh_shared); seq_lens, positions,
                         write_slots and row_lens are those of padding, and max_row_len is what it can be */
} gannet_step_info;
GANNET_API gannet_status gannet_backend_step(const gannet_backend* backend, gannet_step_info* out);

/* Arrays of the current step where the operations read them: in host memory, or copies on the device for kernels of
   your own. int32 [num_rows]. */
typedef struct gannet_step_tensors {
  size_t struct_size;
  gannet_tensor positions;
  gannet_tensor write_slots;
  gannet_tensor row_lens;
} gannet_step_tensors;
GANNET_API gannet_status gannet_backend_step_tensors(const gannet_backend* backend, gannet_step_tensors* out);

/* A part of the prefixes of requests [first_request, first_request + num_requests). */
typedef struct gannet_prefix_chunk {
  size_t struct_size;
  int32_t first_request;
  int32_t num_requests;
  int64_t begin;      /* position of the first token, the same in every request */
  int64_t num_tokens; /* over its requests, at least 1 */
} gannet_prefix_chunk;
GANNET_API gannet_status gannet_backend_prefix_chunk(const gannet_backend* backend, int64_t chunk,
                                                     gannet_prefix_chunk* out);

/* Which rows of the step a call is about. */
typedef int32_t gannet_step_rows;
enum {
  GANNET_ROWS_ALL = 0,
  GANNET_ROWS_PREFILL = 1, /* of the extend requests */
  GANNET_ROWS_DECODE = 2
};

/* This step's rows of one layer, for the rows of the call. */
typedef struct gannet_kv_rows {
  size_t struct_size;
  gannet_tensor latent;  /* fp32 or bf16 [rows, R], the normalised kv_a */
  gannet_tensor rope;    /* same dtype [rows, P], the rotated k_pe */
  gannet_tensor index_k; /* fp32 or bf16 [rows, Di]; only for a layer with an index cache */
} gannet_kv_rows;

/* Who writes this step's rows; there is no default. */
typedef int32_t gannet_write_mode;
enum {
  GANNET_WRITE_NOT_GIVEN = 0, /* an error */
  GANNET_ALREADY_WRITTEN = 1, /* by gannet_backend_write, by an earlier call, or by your own hand */
  GANNET_WRITE_ROWS = 2       /* the call does, first */
};

/* What a row attends to; there is no default. */
typedef int32_t gannet_selection_mode;
enum {
  GANNET_SELECTION_NOT_GIVEN = 0, /* an error */
  GANNET_ATTEND_ALL = 1,          /* every key that a row sees */
  GANNET_ATTEND_SELECTION = 2     /* what gannet_backend_select has chosen, for this layer or an earlier one */
};

/* A list of slots for each row, packed, -1 behind it. The memory is yours. */
typedef struct gannet_selection {
  size_t struct_size;
  gannet_tensor slots;     /* int32 [rows, index_topk] */
  gannet_tensor lens;      /* int32 [rows] */
  gannet_tensor positions; /* optional int32 [rows, index_topk]: the same as positions in the request */
} gannet_selection;

/* Row i of `to` becomes row rows[i] of `from`; -1 gives an empty list (gather_selection of gannet/attention.h). rows is
   in host memory. */
GANNET_API gannet_status gannet_gather_selection(const gannet_selection* from, const int32_t* rows, int64_t num_rows,
                                                 const gannet_selection* to, void* stream);

typedef struct gannet_select_call {
  size_t struct_size;
  int32_t layer;
  gannet_step_rows rows;
  gannet_tensor q;       /* fp32 or bf16 [rows, Hi, Di], rotated */
  gannet_tensor weights; /* fp32 [rows, Hi], with Di^-0.5 and Hi^-0.5 in them */
  gannet_write_mode write;
  const gannet_kv_rows* kv;    /* with GANNET_WRITE_ROWS, else NULL */
  const gannet_selection* out; /* its tensors are written */
} gannet_select_call;

typedef struct gannet_attend_call {
  size_t struct_size;
  int32_t layer;
  gannet_step_rows rows;
  gannet_tensor q; /* fp32 or bf16 [rows, H, R+P], absorbed */
  gannet_write_mode write;
  gannet_selection_mode attend;
  const gannet_kv_rows* kv;          /* with GANNET_WRITE_ROWS, else NULL */
  const gannet_selection* selection; /* with GANNET_ATTEND_SELECTION, else NULL */
  gannet_tensor out;                 /* fp32 or bf16 [rows, H, R] */
  gannet_tensor lse;                 /* optional fp32 [rows, H], natural logarithm */
} gannet_attend_call;

/* Up-projection of latent rows by kv_b: latent [n, R] -> k_nope [n, H, N], v [n, H, V], all packed and of q's dtype. A
   status other than GANNET_OK makes the call fail with it. */
typedef gannet_status (*gannet_expand)(void* user, const gannet_tensor* latent, const gannet_tensor* k_nope,
                                       const gannet_tensor* v);

/* Dense prefill in the expanded form over the rows of the extend requests. */
typedef struct gannet_dense_prefill_call {
  size_t struct_size;
  int32_t layer;
  gannet_write_mode write;
  gannet_tensor q;          /* fp32 or bf16 [rows, H, N+P], rotated */
  gannet_tensor k_nope;     /* same dtype [rows, H, N], of the new tokens */
  gannet_tensor k_rope;     /* same dtype [rows, P], of the new tokens, rotated */
  gannet_tensor v;          /* same dtype [rows, H, V], of the new tokens */
  const gannet_kv_rows* kv; /* with GANNET_WRITE_ROWS, else NULL */
  gannet_expand expand;     /* called once for each prefix chunk; required where a request has a prefix */
  void* expand_user;
  gannet_tensor out; /* same dtype [rows, H, V] */
  gannet_tensor lse; /* optional fp32 [rows, H], natural logarithm */
} gannet_dense_prefill_call;

/* A pass over one prefix chunk, for those who run the loop themselves. */
typedef struct gannet_prefix_pass_call {
  size_t struct_size;
  int32_t layer;
  int64_t chunk;
  gannet_tensor q;      /* [rows, H, N+P] of the whole prefill */
  gannet_tensor k_nope; /* [chunk tokens, H, N] */
  gannet_tensor k_rope; /* [chunk tokens, P] */
  gannet_tensor v;      /* [chunk tokens, H, V] */
  gannet_tensor out;    /* in/out [rows, H, V]: the chunk is merged into it */
  gannet_tensor lse;    /* in/out fp32 [rows, H], natural logarithm */
} gannet_prefix_pass_call;

/* Writes this step's rows of a layer. */
GANNET_API gannet_status gannet_backend_write(gannet_backend* backend, int32_t layer, gannet_step_rows rows,
                                              const gannet_kv_rows* kv);
/* Chooses the keys of each row by the layer's indexer. "dsa" only. */
GANNET_API gannet_status gannet_backend_select(gannet_backend* backend, const gannet_select_call* call);
/* Absorbed attention, over prefill rows as well as decode rows. */
GANNET_API gannet_status gannet_backend_attend(gannet_backend* backend, const gannet_attend_call* call);
/* Causal pass over the new tokens, then for each prefix chunk: gather, expand, pass, merge. */
GANNET_API gannet_status gannet_backend_dense_prefill(gannet_backend* backend, const gannet_dense_prefill_call* call);
/* The parts of that. prefill_new_tokens requires lse and does not look at expand; gather_prefix fills latent [chunk
   tokens, R] and rope [chunk tokens, P], fp32 or bf16. */
GANNET_API gannet_status gannet_backend_prefill_new_tokens(gannet_backend* backend,
                                                           const gannet_dense_prefill_call* call);
GANNET_API gannet_status gannet_backend_gather_prefix(gannet_backend* backend, int32_t layer, int64_t chunk,
                                                      const gannet_tensor* latent, const gannet_tensor* rope);
GANNET_API gannet_status gannet_backend_prefill_prefix(gannet_backend* backend, const gannet_prefix_pass_call* call);

/* ---- the gate: rows that somebody else brings in ----------------------------------------------------------------- */

/* A gate per layer, usable from any thread, all open at first. In a hook: wait = a function that returns
   gannet_gate_wait(user, layer). */
typedef struct gannet_gate gannet_gate;
GANNET_API gannet_status gannet_gate_create(int32_t num_layers, gannet_gate** out);
GANNET_API void gannet_gate_free(gannet_gate** gate);
/* layer -1: every layer. */
GANNET_API gannet_status gannet_gate_close(gannet_gate* gate, int32_t layer);
/* What was written before this is seen by whoever returns from the wait after it. */
GANNET_API gannet_status gannet_gate_open(gannet_gate* gate, int32_t layer);
/* The rows will not come: every wait for the layer fails with GANNET_DEVICE and this reason, until it is closed or
   opened. */
GANNET_API gannet_status gannet_gate_fail(gannet_gate* gate, int32_t layer, const char* why);
GANNET_API gannet_status gannet_gate_wait(gannet_gate* gate, int32_t layer);

#ifdef __cplusplus
}
#endif

#endif /* GANNET_C_API_H_ */
