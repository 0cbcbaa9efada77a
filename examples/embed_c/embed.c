/* An engine in C that has pages, a page table and threads of its own, and takes the attention from Gannet: a dense
   decode by plan and run, and a step of DeepSeek sparse attention through the backend "dsa". Each result is compared
   with loops in double precision below; the exit code is 0 if they agree. */
#define _POSIX_C_SOURCE 200809L
#include <gannet/c_api.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the engine's threads ---------------------------------------------------------------------------------------- */

enum { NUM_WORKERS = 3 }; /* the caller is worker 0 */

typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pthread_t threads[NUM_WORKERS];
  int32_t num_started; /* of the threads; gives each its number */
  int stop;
  /* The job: tasks [next, num_tasks) are not taken yet, num_running are being run. */
  gannet_task task;
  void* data;
  int64_t next, num_tasks, num_running;
} thread_pool;

/* Takes tasks until there are none; called, and returns, with the mutex locked. */
static void take_tasks(thread_pool* pool, int32_t worker) {
  while (pool->next < pool->num_tasks) {
    const int64_t task = pool->next++;
    pool->num_running++;
    pthread_mutex_unlock(&pool->mutex);
    pool->task(pool->data, task, worker);
    pthread_mutex_lock(&pool->mutex);
    pool->num_running--;
  }
  pthread_cond_broadcast(&pool->changed);
}

static void* thread_main(void* user) {
  thread_pool* pool = user;
  pthread_mutex_lock(&pool->mutex);
  const int32_t worker = ++pool->num_started;
  while (!pool->stop) {
    take_tasks(pool, worker);
    while (!pool->stop && pool->next >= pool->num_tasks) pthread_cond_wait(&pool->changed, &pool->mutex);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

/* What Gannet calls. */
static gannet_status parallel_for(void* user, int64_t num_tasks, gannet_task task, void* data) {
  thread_pool* pool = user;
  pthread_mutex_lock(&pool->mutex);
  pool->task = task;
  pool->data = data;
  pool->next = 0;
  pool->num_tasks = num_tasks;
  pthread_cond_broadcast(&pool->changed);
  take_tasks(pool, 0);
  while (pool->num_running > 0) pthread_cond_wait(&pool->changed, &pool->mutex);
  pthread_mutex_unlock(&pool->mutex);
  return GANNET_OK;
}

static void start(thread_pool* pool) {
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->changed, NULL);
  for (int w = 1; w < NUM_WORKERS; ++w) {
    if (pthread_create(&pool->threads[w], NULL, thread_main, pool) != 0) abort();
  }
}

static void stop(thread_pool* pool) {
  pthread_mutex_lock(&pool->mutex);
  pool->stop = 1;
  pthread_cond_broadcast(&pool->changed);
  pthread_mutex_unlock(&pool->mutex);
  for (int w = 1; w < NUM_WORKERS; ++w) pthread_join(pool->threads[w], NULL);
  pthread_cond_destroy(&pool->changed);
  pthread_mutex_destroy(&pool->mutex);
}

/* ---- the engine's pages ------------------------------------------------------------------------------------------ */

enum {
  HEADS = 4,
  LATENT = 512,
  ROPE = 64,
  WIDTH = LATENT + ROPE,
  INDEX_HEADS = 2,
  INDEX_DIM = 128,
  TOPK = 8,
  PAGE_SIZE = 64,
  PAGES = 5,
  SLOTS = PAGES * PAGE_SIZE,
  REQUESTS = 2
};
static const float kScale = 0.0721688f; /* 192^-0.5 */

/* The rows of a page lie together, and behind them the page's index keys: one piece of memory to move about. */
typedef struct {
  float latent[PAGE_SIZE][WIDTH];
  float index_k[PAGE_SIZE][INDEX_DIM];
} page;

/* Request 0 has 70 tokens in pages 3 and 1, request 1 has 3 in page 4. */
static const int32_t kTable[REQUESTS][2] = {{3, 1}, {4, 0}};
static const int32_t kLens[REQUESTS] = {70, 3};

static int32_t slot_of(int request, int position) {
  return kTable[request][position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE;
}
static const float* row_of(const page* pages, int32_t slot) { return pages[slot / PAGE_SIZE].latent[slot % PAGE_SIZE]; }
static const float* key_of(const page* pages, int32_t slot) {
  return pages[slot / PAGE_SIZE].index_k[slot % PAGE_SIZE];
}

/* Numbers in [-1, 1). */
static float draw(void) {
  static uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return (float)(int32_t)state / 2147483648.0f;
}
static void fill(void* floats, size_t bytes) {
  float* x = floats;
  for (size_t i = 0; i < bytes / sizeof(float); ++i) x[i] = draw();
}
static void poison(void* floats, size_t bytes) {
  float* x = floats;
  for (size_t i = 0; i < bytes / sizeof(float); ++i) x[i] = NAN;
}

/* ---- what is right ----------------------------------------------------------------------------------------------- */

static double dot(const float* a, const float* b, int n) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += (double)a[i] * (double)b[i];
  return sum;
}

/* Of two errors; NaN is the largest. */
static double larger(double a, double b) { return b <= a ? a : b; }

/* Largest difference of one head's output from attention over the given slots. */
static double error_of(const page* pages, const float* q, const int32_t* slots, int num_slots, const float* out) {
  double weight[SLOTS], sum = 0.0, worst = 0.0;
  for (int i = 0; i < num_slots; ++i) {
    weight[i] = exp((double)kScale * dot(q, row_of(pages, slots[i]), WIDTH));
    sum += weight[i];
  }
  for (int d = 0; d < LATENT; ++d) {
    double right = 0.0;
    for (int i = 0; i < num_slots; ++i) right += weight[i] / sum * (double)row_of(pages, slots[i])[d];
    worst = larger(worst, fabs(right - (double)out[d]));
  }
  return worst;
}

/* The TOPK slots of a request with the highest index scores, or all where it has no more: how many. */
static int best_slots(const page* pages, const float* q, const float* weights, int request, int32_t* slots) {
  double score[SLOTS];
  const int n = kLens[request];
  for (int i = 0; i < n; ++i) {
    score[i] = 0.0;
    for (int h = 0; h < INDEX_HEADS; ++h) {
      const double s = dot(q + h * INDEX_DIM, key_of(pages, slot_of(request, i)), INDEX_DIM);
      score[i] += s > 0.0 ? (double)weights[h] * s : 0.0;
    }
  }
  int count = 0;
  for (; count < TOPK && count < n; ++count) {
    int best = -1;
    for (int i = 0; i < n; ++i) {
      if (!isnan(score[i]) && (best < 0 || score[i] > score[best])) best = i;
    }
    slots[count] = slot_of(request, best);
    score[best] = NAN; /* taken */
  }
  return count;
}

/* ---- the two steps ----------------------------------------------------------------------------------------------- */

static void must(gannet_status status) {
  if (status == GANNET_OK) return;
  fprintf(stderr, "%s: %s\n", gannet_status_name(status), gannet_last_error());
  exit(1);
}

/* Sums of 576 products in fp32 instead of double: 576 * 2^-24 of values of size 1 would be 3e-5 at worst. */
static const double kTolerance = 5e-5;

static int report(const char* what, double worst) {
  printf("%s: largest error %.1e\n", what, worst);
  return worst <= kTolerance;
}

static gannet_latent_cache latent_of(page* pages) {
  const gannet_latent_cache cache = {.struct_size = sizeof cache,
                                     .data = pages[0].latent,
                                     .format = GANNET_LATENT_F32,
                                     .latent_dim = LATENT,
                                     .rope_dim = ROPE,
                                     .page_size = PAGE_SIZE,
                                     .num_pages = PAGES,
                                     .page_stride_bytes = sizeof(page)};
  return cache;
}

/* One dense decode: an operation that is planned once and may be run any number of times. */
static int dense_decode(gannet_context* context, page* pages, const gannet_page_table* table) {
  static float q[REQUESTS][HEADS][WIDTH], out[REQUESTS][HEADS][LATENT];
  fill(q, sizeof q);
  const gannet_latent_cache cache = latent_of(pages);
  const gannet_mla_decode args = {
      .op = {sizeof args, GANNET_OP_MLA_DECODE},
      .q = gannet_tensor_3d(q, GANNET_F32, REQUESTS, HEADS, WIDTH),
      .cache = &cache,
      .pages = table,
      .rows = {.seq_lens = gannet_tensor_1d(kLens, GANNET_I32, REQUESTS), .q_len = 1},
      .out = gannet_tensor_3d(out, GANNET_F32, REQUESTS, HEADS, LATENT),
      .softmax_scale = kScale,
  };
  gannet_plan* plan = NULL;
  must(gannet_plan_create(context, &args.op, NULL, &plan));
  const size_t bytes = gannet_plan_workspace_bytes(plan);
  void* workspace = malloc(bytes);
  must(gannet_plan_run(plan, &args.op, workspace, bytes, NULL));
  printf("dense decode runs on %s\n", gannet_plan_impl(plan));
  free(workspace);
  gannet_plan_free(&plan);

  double worst = 0.0;
  for (int r = 0; r < REQUESTS; ++r) {
    int32_t slots[SLOTS];
    for (int i = 0; i < kLens[r]; ++i) slots[i] = slot_of(r, i);
    for (int h = 0; h < HEADS; ++h) worst = larger(worst, error_of(pages, q[r][h], slots, kLens[r], out[r][h]));
  }
  return report("dense decode", worst);
}

/* One step of one layer with an indexer: its token's rows are written, each row's keys chosen, and attended to. */
static int sparse_step(gannet_context* context, page* pages, const gannet_page_table* table) {
  const gannet_backend_config config = {.struct_size = sizeof config,
                                        .arch = GANNET_ARCH_DSA,
                                        .num_heads = HEADS,
                                        .latent_dim = LATENT,
                                        .rope_dim = ROPE,
                                        .q_lora_rank = 1536,
                                        .softmax_scale = kScale,
                                        .index_num_heads = INDEX_HEADS,
                                        .index_head_dim = INDEX_DIM,
                                        .index_topk = TOPK,
                                        .page_size = PAGE_SIZE,
                                        .max_context_len = 1024};
  gannet_backend* backend = NULL;
  must(gannet_backend_create(context, &config, NULL, NULL, &backend));
  const gannet_latent_cache latent_cache = latent_of(pages);
  const gannet_index_cache index_cache = {.struct_size = sizeof index_cache,
                                          .data = pages[0].index_k,
                                          .format = GANNET_INDEX_K_F32,
                                          .head_dim = INDEX_DIM,
                                          .page_size = PAGE_SIZE,
                                          .num_pages = PAGES,
                                          .page_stride_bytes = sizeof(page)};
  const gannet_layer layers[1] = {{&latent_cache, &index_cache}};
  must(gannet_backend_bind(backend, layers, 1));

  /* Once a step. */
  const gannet_step step = {
      .struct_size = sizeof step, .seq_lens = kLens, .num_requests = REQUESTS, .q_len = 1, .pages = table};
  must(gannet_backend_prepare(backend, &step));

  /* Once a layer. A model computes these; here they are drawn. */
  static float q[REQUESTS][HEADS][WIDTH], out[REQUESTS][HEADS][LATENT];
  static float index_q[REQUESTS][INDEX_HEADS][INDEX_DIM], weights[REQUESTS][INDEX_HEADS];
  static float latent[REQUESTS][LATENT], rope[REQUESTS][ROPE], index_k[REQUESTS][INDEX_DIM];
  fill(q, sizeof q);
  fill(index_q, sizeof index_q);
  fill(weights, sizeof weights);
  fill(latent, sizeof latent);
  fill(rope, sizeof rope);
  fill(index_k, sizeof index_k);
  const gannet_kv_rows kv = {.struct_size = sizeof kv,
                             .latent = gannet_tensor_2d(latent, GANNET_F32, REQUESTS, LATENT),
                             .rope = gannet_tensor_2d(rope, GANNET_F32, REQUESTS, ROPE),
                             .index_k = gannet_tensor_2d(index_k, GANNET_F32, REQUESTS, INDEX_DIM)};
  int32_t slots[REQUESTS][TOPK], lens[REQUESTS];
  const gannet_selection selection = {.struct_size = sizeof selection,
                                      .slots = gannet_tensor_2d(slots, GANNET_I32, REQUESTS, TOPK),
                                      .lens = gannet_tensor_1d(lens, GANNET_I32, REQUESTS)};
  const gannet_select_call select = {
      .struct_size = sizeof select,
      .q = gannet_tensor_3d(index_q, GANNET_F32, REQUESTS, INDEX_HEADS, INDEX_DIM),
      .weights = gannet_tensor_2d(weights, GANNET_F32, REQUESTS, INDEX_HEADS),
      .write = GANNET_WRITE_ROWS,
      .kv = &kv,
      .out = &selection,
  };
  must(gannet_backend_select(backend, &select));
  const gannet_attend_call attend = {
      .struct_size = sizeof attend,
      .q = gannet_tensor_3d(q, GANNET_F32, REQUESTS, HEADS, WIDTH),
      .write = GANNET_ALREADY_WRITTEN,
      .attend = GANNET_ATTEND_SELECTION,
      .selection = &selection,
      .out = gannet_tensor_3d(out, GANNET_F32, REQUESTS, HEADS, LATENT),
  };
  must(gannet_backend_attend(backend, &attend));
  gannet_backend_free(&backend);

  int good = 1;
  double worst = 0.0;
  for (int r = 0; r < REQUESTS; ++r) {
    int32_t right[TOPK];
    const int n = best_slots(pages, index_q[r][0], weights[r], r, right);
    int found = 0;
    for (int i = 0; i < n; ++i) {
      for (int k = 0; k < lens[r]; ++k) found += slots[r][k] == right[i];
    }
    printf("request %d: the %d chosen keys are %s\n", r, (int)lens[r], lens[r] == n && found == n ? "right" : "WRONG");
    good = good && lens[r] == n && found == n;
    for (int h = 0; h < HEADS; ++h) worst = larger(worst, error_of(pages, q[r][h], right, n, out[r][h]));
  }
  return report("sparse step", worst) && good;
}

int main(void) {
  must(gannet_check_abi());
  static thread_pool pool;
  start(&pool);
  const gannet_executor executor = {sizeof executor, &pool, NUM_WORKERS, parallel_for};
  const gannet_context_options options = {.struct_size = sizeof options, .executor = &executor};
  gannet_context* context = NULL;
  must(gannet_context_create(&options, &context));

  /* Pages hold what they held before: only the tokens of the two requests are anything. */
  static page pages[PAGES];
  poison(pages, sizeof pages);
  for (int r = 0; r < REQUESTS; ++r) {
    for (int i = 0; i < kLens[r]; ++i) {
      const int32_t s = slot_of(r, i);
      fill(pages[s / PAGE_SIZE].latent[s % PAGE_SIZE], sizeof(float) * WIDTH);
      fill(pages[s / PAGE_SIZE].index_k[s % PAGE_SIZE], sizeof(float) * INDEX_DIM);
    }
  }
  const gannet_page_table table = gannet_pages_padded(gannet_tensor_2d(kTable, GANNET_I32, REQUESTS, 2));
  int good = dense_decode(context, pages, &table);
  good = sparse_step(context, pages, &table) && good;

  /* What a mistake looks like. */
  const gannet_topk nothing = {.op = {sizeof nothing, GANNET_OP_TOPK}};
  const gannet_status status = gannet_run_once(context, &nothing.op, NULL);
  printf("%s: %s\n", gannet_status_name(status), gannet_last_error());
  good = good && status == GANNET_INVALID_ARGUMENT;

  gannet_context_free(&context);
  stop(&pool);
  return good ? 0 : 1;
}
